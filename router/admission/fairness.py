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
active: it finds one at once, and the next one that is left is kept again.
Tenants that all wait are the least served in turn, and leave no place empty.
"""

from collections import defaultdict
from collections.abc import Iterable

from router.admission.claims import Claim
from router.balancing.policy import Candidate

CREDIT_TOKENS = 4096.0
"""What a tenant may keep of the time that it did not use, in weighted tokens."""
ACTIVE_SECONDS = 10.0
"""A tenant is active for this long after its last request came."""


def kept_places(max_num_seqs: int) -> int:
    """Returns how many of an engine's places are kept for the least served."""
    return max_num_seqs // 8


def has_open_place(engine: Candidate, sequences: int) -> bool:
    """Says whether an engine has places that are not kept; an empty one has."""
    open_places = engine.max_num_seqs - kept_places(engine.max_num_seqs)
    return not engine.sequences or engine.sequences + sequences <= open_places


class TenantCounters:
    """What each tenant has been served, comparably."""

    def __init__(self) -> None:
        self._served: defaultdict[str, float] = defaultdict(float)
        self._turns: defaultdict[str, int] = defaultdict(int)  # when each had its last
        self._turn = 0
        self._last = ""  # the tenant that had the last turn
        self._seen: dict[str, float] = {}  # when each active one asked last

    def __getitem__(self, tenant: str) -> float:
        return self._served[tenant]

    def asked(self, tenant: str, now: float) -> None:
        """A tenant has asked for something: it is active."""
        self._seen[tenant] = now

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
        self._seen = {n: seen for n, seen in self._seen.items() if now - seen <= ACTIVE_SECONDS}
        return all(self._served[tenant] <= self._served[name] for name in self._seen)

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
