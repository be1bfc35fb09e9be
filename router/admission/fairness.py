"""Whose turn it is among tenants: who has been served the least.

The virtual token counter of "Fairness in Serving Large Language Models" (Sheng
et al., OSDI 2024), with weights. A tenant's counter is what it was served, in
weighted tokens, over its own weight. One that comes back from having nothing to
ask is lifted to the least of those who wait: it competes from now on, and the
time that it did not use is not kept for it.

Between two tenants that both wait all the time, counters so never differ by more
than one request's charge, plus what running requests turn out to cost beyond or
below what was expected of them.
"""

from collections import defaultdict
from collections.abc import Iterable

from router.admission.claims import Claim
from router.tenants import Tenant


class TenantCounters:
    """What each tenant has been served, comparably."""

    def __init__(self) -> None:
        self._served: defaultdict[str, float] = defaultdict(float)
        self._turns: defaultdict[str, int] = defaultdict(int)  # when each had its last
        self._turn = 0
        self._last = ""  # the tenant that had the last turn

    def __getitem__(self, tenant: str) -> float:
        return self._served[tenant]

    def join(self, tenant: str, waiting: Iterable[str]) -> None:
        """Lets a tenant compete that had nothing waiting; `waiting` are those that have."""
        level = min((self._served[name] for name in waiting), default=self._served[self._last])
        self._served[tenant] = max(self._served[tenant], level)

    def next(self, tenants: Iterable[str]) -> str:
        """Returns whose turn it is: the least served, of equals the one whose last is longest ago.

        Raises:
            ValueError: There are no `tenants`.
        """
        return min(tenants, key=lambda name: (self._served[name], self._turns[name]))

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
        tenant: Tenant = claim.ticket.tenant
        self._served[tenant.name] += (charge - claim.charged) / tenant.weight
        claim.charged = charge
