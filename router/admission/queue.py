"""The requests that wait for engines of one model, and whose turn it is.

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

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

from octavo.common.priority import PRIORITY_SECONDS
from octavo.router.admission.claims import Claim
from octavo.router.admission.rates import RECENT_SECONDS
from octavo.router.admission.reserved_slots import Burst, RecentRequests
from octavo.router.tenants.tenant import Tenant

E = TypeVar("E")

_order = attrgetter("order")

CREDIT_TOKENS = 4096.0
"""Maximum credit of a tenant that was idle, in weighted tokens."""


@dataclass(slots=True)
class _Share(Generic[E]):
    """One tenant's claims, in their order."""

    weight: float
    claims: list[Claim[E]] = field(default_factory=list)
    sequences: int = 0
    tokens: int = 0

    def place(self, claim: Claim[E]) -> int:
        """Return how many of its claims go before one."""
        return bisect.bisect_left(self.claims, claim.order, key=_order)


class FairQueue(Generic[E]):
    """Tenants in turn by what they were served; each tenant's requests by priority and age.

    A request goes before all requests of lower priority until those have waited
    `PRIORITY_SECONDS` for each unit of difference; from then on they are equal. So the
    eligible tenants are those with a first request that has reached the highest
    waiting priority.
    """

    def __init__(self) -> None:
        self._served: defaultdict[str, float] = defaultdict(float)
        self._turns: defaultdict[str, int] = defaultdict(int)  # when each had its last
        self._turn = 0
        self._last = ""  # the tenant that had the last turn
        self._recent: dict[str, RecentRequests] = {}  # of those active
        self._shares: dict[str, _Share[E]] = {}
        self._priorities: Counter[int] = Counter()
        self.tokens = 0

    def __len__(self) -> int:
        return self._priorities.total()

    def __iter__(self) -> Iterator[Claim[E]]:
        return (claim for share in self._shares.values() for claim in share.claims)

    def __contains__(self, claim: Claim[E]) -> bool:
        share = self._shares.get(claim.tenant)
        return share is not None and share.claims[share.place(claim) :][:1] == [claim]

    @property
    def tenants(self) -> int:
        """How many tenants wait."""
        return len(self._shares)

    def sequences(self, tenant: str) -> int:
        """Return how many sequences a tenant waits with."""
        share = self._shares.get(tenant)
        return share.sequences if share else 0

    def position(self, claim: Claim[E]) -> int:
        """Return a waiting claim's place by priority and age, from 1."""
        return 1 + sum(share.place(claim) for share in self._shares.values())

    def push(self, claim: Claim[E]) -> None:
        """Add a claim."""
        share = self._shares.get(claim.tenant)
        if share is None:
            self.join(claim.tenant, self._shares)
            share = self._shares[claim.tenant] = _Share(claim.request.tenant.weight)
        bisect.insort(share.claims, claim, key=_order)
        share.sequences += claim.sequences
        share.tokens += claim.tokens
        self.tokens += claim.tokens
        self._priorities[claim.request.priority] += 1

    def remove(self, claim: Claim[E]) -> None:
        """Remove a claim."""
        share = self._shares[claim.tenant]
        del share.claims[share.place(claim)]
        share.sequences -= claim.sequences
        share.tokens -= claim.tokens
        self.tokens -= claim.tokens
        if not share.claims:
            del self._shares[claim.tenant]
        priority = claim.request.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]

    def first(self, now: float) -> Claim[E] | None:
        """Return the next claim, or None if the queue is empty."""
        if not self._shares:
            return None
        if len(self._shares) == 1:
            (share,) = self._shares.values()
            return share.claims[0]
        heads = {name: share.claims[0].order[0] for name, share in self._shares.items()}
        eligible_before = max(now - max(self._priorities) * PRIORITY_SECONDS, min(heads.values()))
        eligible = (name for name, arrival in heads.items() if arrival <= eligible_before)
        name = self._next(eligible)
        return self._shares[name].claims[0]

    def displaced(self, newcomer: Claim[E], requests: int, tokens: int) -> list[Claim[E]] | None:
        """Return the claims to refuse so that a new one can wait; None to refuse the new one.

        It is always the last claim of the tenant with the most waiting tokens for its weight,
        so that no tenant's flood keeps others out. Migrated requests are not refused.

        Args:
            newcomer: A claim that is not in the queue.
            requests: Minimum number of claims to refuse.
            tokens: Minimum tokens of these claims together.
        """
        weights = {name: share.weight for name, share in self._shares.items()}
        burdens = {name: share.tokens for name, share in self._shares.items()}
        weights[newcomer.tenant] = newcomer.request.tenant.weight
        burdens[newcomer.tenant] = burdens.get(newcomer.tenant, 0) + newcomer.tokens
        tails = {name: list(share.claims) for name, share in self._shares.items()}
        leaving: list[Claim[E]] = []
        while requests > len(leaving) or tokens > sum(claim.tokens for claim in leaving):
            heaviest = max(burdens, key=lambda name: burdens[name] / weights[name])
            tail = tails.get(heaviest)
            if not tail or tail[-1].migrated:
                return None
            if heaviest == newcomer.tenant and tail[-1].order < newcomer.order:
                return None
            leaving.append(tail.pop())
            burdens[heaviest] -= leaving[-1].tokens
        return leaving

    def ahead(self, newcomer: Claim[E]) -> float:
        """Estimate the tokens that go before a claim that is not in the queue yet.

        These are its own tenant's before it, and of each other tenant as many as that
        tenant can be served until both are served equally.
        """
        if not self._shares:
            return 0.0
        tenant, served = newcomer.request.tenant, self._served
        own_share = self._shares.get(tenant.name)
        level = served[tenant.name]
        if own_share is None:
            level = max(level, min(served[name] for name in self._shares))
        before = _before(own_share, newcomer) if own_share else 0.0
        level += before / tenant.weight
        urgent = newcomer.request.priority > max(self._priorities)
        others = 0.0
        for name, share in self._shares.items():
            if share is not own_share:
                lead = max(level - served[name], 0.0) * share.weight
                others += min(_before(share, newcomer) if urgent else share.tokens, lead)
        return before + others

    # The service that each tenant has received, on one scale.

    def served(self, tenant: str) -> float:
        """Return the service that a tenant has received."""
        return self._served[tenant]

    def asked(self, tenant: Tenant, sequences: int, now: float) -> None:
        """Record a request of a tenant, which makes the tenant active."""
        self._recent.setdefault(tenant.name, RecentRequests()).add(sequences, now, tenant.weight)

    def join(self, tenant: str, waiting: Iterable[str] = ()) -> None:
        """Let a tenant compete that had nothing waiting; `waiting` are those that have."""
        level = min((self._served[name] for name in waiting), default=self._served[self._last])
        self._served[tenant] = max(self._served[tenant], level - CREDIT_TOKENS)

    def _next(self, tenants: Iterable[str]) -> str:
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


def _before(share: _Share[E], newcomer: Claim[E]) -> float:
    """Estimate the tokens of a tenant's claims that go before one, from their number."""
    return share.tokens * share.place(newcomer) / len(share.claims)
