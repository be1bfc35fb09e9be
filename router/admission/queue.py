"""The requests that wait for engines of one model, and the order in which they get one."""

import bisect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from octavo.common.priority import PRIORITY_SECONDS
from octavo.router.admission.claims import Claim
from octavo.router.admission.fairness import TenantCounters

E = TypeVar("E")

_order = attrgetter("order")


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

    Args:
        counters: Service that each tenant received.
    """

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
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
            self._counters.join(claim.tenant, self._shares)
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
        name = self._counters.next(eligible)
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
        tenant, counters = newcomer.request.tenant, self._counters
        own_share = self._shares.get(tenant.name)
        level = counters[tenant.name]
        if own_share is None:
            level = max(level, min(counters[name] for name in self._shares))
        before = _before(own_share, newcomer) if own_share else 0.0
        level += before / tenant.weight
        urgent = newcomer.request.priority > max(self._priorities)
        others = 0.0
        for name, share in self._shares.items():
            if share is not own_share:
                lead = max(level - counters[name], 0.0) * share.weight
                others += min(_before(share, newcomer) if urgent else share.tokens, lead)
        return before + others


def _before(share: _Share[E], newcomer: Claim[E]) -> float:
    """Estimate the tokens of a tenant's claims that go before one, from their number."""
    return share.tokens * share.place(newcomer) / len(share.claims)
