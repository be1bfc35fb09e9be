"""Whose turn it is among tenants, and what is kept free for those who are not there all the time.

The virtual token counter of "Fairness in Serving Large Language Models" (Sheng
et al., OSDI 2024), with weights. A tenant's counter is what it was served, in
weighted tokens, over its own weight. One that comes back from having nothing to
ask is lifted to the least of those who wait, less a little, so that a few
requests at once do not wait for its share of them: the rest of the time that it
did not use is not kept for it.

Between two tenants that both wait all the time, what they were served so never
grows apart by more than one request's charge and that little, plus what running
requests turn out to cost beyond or below what was expected of them.

A turn is worth little, though, where one tenant floods the queue: then no place
ever is free when another's request comes, and it waits for one to be. So an
engine's last places are only for the tenant that was served the least of those
active: it finds one at once, and the next one that is left is kept again. How many are
kept follows the bursts in which it asks.
Tenants that all wait are the least served in turn, and leave no place empty.
"""

from collections import defaultdict, deque
from collections.abc import Iterable

from router.admission.claims import Claim
from router.balancing.policy import Candidate

CREDIT_TOKENS = 4096.0
"""What a tenant may keep of the time that it did not use, in weighted tokens."""
ACTIVE_SECONDS = 10.0
"""A tenant is active for this long after its last request came."""
BURST_SECONDS = 1.0
"""Requests that come within this time count as come at once: places fall free in clumps."""
REMEMBERED = 64
"""Requests of a tenant, by which its bursts are known."""


def has_open_place(engine: Candidate, sequences: int, burst: int) -> bool:
    """Says whether an engine has places that are not kept; an empty one has.

    Args:
        engine: It.
        sequences: That would take them.
        burst: Places that the least served tenant may want at once: so many are kept,
            but at least an eighth, and at most a quarter.
    """
    most = engine.max_num_seqs
    kept = min(max(burst, most // 8), most // 4)
    return not engine.sequences or engine.sequences + sequences <= most - kept


class TenantCounters:
    """What each tenant has been served, comparably."""

    def __init__(self) -> None:
        self._served: defaultdict[str, float] = defaultdict(float)
        self._turns: defaultdict[str, int] = defaultdict(int)  # when each had its last
        self._turn = 0
        self._last = ""  # the tenant that had the last turn
        # When each active one asked of late, the oldest first, and for how many sequences.
        self._asked: dict[str, deque[tuple[float, int]]] = {}

    def __getitem__(self, tenant: str) -> float:
        return self._served[tenant]

    def asked(self, tenant: str, sequences: int, now: float) -> None:
        """A tenant has asked for something: it is active."""
        self._asked.setdefault(tenant, deque(maxlen=REMEMBERED)).append((now, sequences))

    def join(self, tenant: str, waiting: Iterable[str] = ()) -> None:
        """Lets a tenant compete that had nothing waiting; `waiting` are those that have."""
        level = min((self._served[name] for name in waiting), default=self._served[self._last])
        self._served[tenant] = max(self._served[tenant], level - CREDIT_TOKENS)

    def next(self, tenants: Iterable[str]) -> str:
        """Returns whose turn it is: the least served, of equals the one whose last is longest ago.

        Raises:
            ValueError: There are no `tenants`.
        """
        return min(tenants, key=lambda name: (self._served[name], self._turns[name]))

    def is_least(self, tenant: str, now: float) -> bool:
        """Says whether no active tenant was served less."""
        self._forget(now)
        return all(self._served[tenant] <= self._served[name] for name in self._asked)

    def burst(self, now: float) -> int:
        """Returns the most sequences that the least served active tenant asked for at once."""
        self._forget(now)
        if not self._asked:
            return 0
        asked = self._asked[min(self._asked, key=self._served.__getitem__)]
        most = wanted = first = 0
        for time, sequences in asked:
            wanted += sequences
            while asked[first][0] < time - BURST_SECONDS:
                wanted -= asked[first][1]
                first += 1
            most = max(most, wanted)
        return most

    def _forget(self, now: float) -> None:
        self._asked = {
            name: asked
            for name, asked in self._asked.items()
            if now - asked[-1][0] <= ACTIVE_SECONDS
        }

    def admit(self, claim: Claim) -> None:
        """Charges a tenant for what one request of its is expected to come to."""
        name = claim.ticket.tenant.name
        self._turn += 1
        self._turns[name] = self._turn
        self._last = name
        self.correct(claim)

    def correct(self, claim: Claim) -> None:
        """Charges what a running request has had beyond what was expected of it."""
        self._charge(claim, claim.charge)

    def settle(self, claim: Claim) -> None:
        """Makes the charge for a request that has ended what it was served."""
        self._charge(claim, claim.served)

    def _charge(self, claim: Claim, charge: float) -> None:
        tenant = claim.ticket.tenant
        self._served[tenant.name] += (charge - claim.charged) / tenant.weight
        claim.charged = charge
