"""Fairness: which tenant's turn it is.

This is the virtual token counter of "Fairness in Serving Large Language Models"
(Sheng et al., OSDI 2024), with weights. A tenant's counter is the weighted tokens that it was
served, divided by its own weight; the tenant with the lowest counter goes next. The counter
of a tenant that returns from idleness is raised to the lowest of the waiting tenants, less
CREDIT_TOKENS: it keeps that much of the share that it did not use, and no more.

So the counters of two tenants that always have waiting requests differ by at most one request's
charge and the credit, plus what running requests cost beyond or below the expectation.

The least served active tenant is dispatched at once: some slots are reserved for it
(`reserved_slots`). Tenants that all wait are the least served in turn, and leave no slot empty.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from octavo.router.admission.claims import Claim
from octavo.router.admission.rates import RECENT_SECONDS
from octavo.router.admission.reserved_slots import Burst, RecentRequests
from octavo.router.tenants.tenant import Tenant

CREDIT_TOKENS = 4096.0
"""Maximum credit of a tenant that was idle, in weighted tokens."""


class TenantCounters:
    """The service that each tenant has received, on one scale."""

    def __init__(self) -> None:
        self._served: defaultdict[str, float] = defaultdict(float)
        self._turns: defaultdict[str, int] = defaultdict(int)  # when each had its last
        self._turn = 0
        self._last = ""  # the tenant that had the last turn
        self._recent: dict[str, RecentRequests] = {}  # of those active

    def __getitem__(self, tenant: str) -> float:
        return self._served[tenant]

    def asked(self, tenant: Tenant, sequences: int, now: float) -> None:
        """Record a request of a tenant, which makes the tenant active."""
        self._recent.setdefault(tenant.name, RecentRequests()).add(sequences, now, tenant.weight)

    def join(self, tenant: str, waiting: Iterable[str] = ()) -> None:
        """Let a tenant compete that had nothing waiting; `waiting` are those that have."""
        level = min((self._served[name] for name in waiting), default=self._served[self._last])
        self._served[tenant] = max(self._served[tenant], level - CREDIT_TOKENS)

    def next(self, tenants: Iterable[str]) -> str:
        """Return whose turn it is: the least served; of equals, the one served longest ago.

        Raises:
            ValueError: There are no `tenants`.
        """
        return min(tenants, key=lambda name: (self._served[name], self._turns[name]))

    def is_least(self, tenant: str, now: float) -> bool:
        """Return whether no active tenant was served less."""
        self._forget(now)
        return all(self._served[tenant] <= self._served[name] for name in self._recent)

    def share(self, tenant: Tenant, now: float) -> float:
        """Return a tenant's share of all, beside the active tenants, if all want it.

        It need not be active itself: it may have waited since it asked last.
        """
        self._forget(now)
        others = sum(d.weight for name, d in self._recent.items() if name != tenant.name)
        return tenant.weight / (tenant.weight + others)

    def bursts_of_least(self, now: float) -> Sequence[Burst]:
        """Return the bursts of the least served active tenant."""
        self._forget(now)
        if not self._recent:
            return ()
        return self._recent[min(self._recent, key=self._served.__getitem__)].bursts

    def _forget(self, now: float) -> None:
        self._recent = {
            name: recent
            for name, recent in self._recent.items()
            if now - recent.newest <= RECENT_SECONDS
        }

    def admit(self, claim: Claim[Any]) -> None:
        """Charge a tenant what its request is expected to cost."""
        name = claim.request.tenant.name
        self._turn += 1
        self._turns[name] = self._turn
        self._last = name
        self.correct(claim)

    def correct(self, claim: Claim[Any]) -> None:
        """Charge what a running request has cost beyond what was expected."""
        self._charge(claim, claim.charge)

    def settle(self, claim: Claim[Any]) -> None:
        """Replace an ended request's charge by the service that it received."""
        self._charge(claim, claim.served)

    def _charge(self, claim: Claim[Any], charge: float) -> None:
        tenant = claim.request.tenant
        self._served[tenant.name] += (charge - claim.charged) / tenant.weight
        claim.charged = charge
