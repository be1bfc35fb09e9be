"""Those who wait for engines of one model, and in which order they go."""

import bisect
from asyncio import Future, TimerHandle
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from octavo.common.priority import PRIORITY_SECONDS
from octavo.router.admission.claims import Claim
from octavo.router.admission.fairness import TenantCounters

G = TypeVar("G")


@dataclass(order=True, slots=True)
class Waiter(Generic[G]):
    """One who waits.

    Attributes:
        virtual_arrival: Its place among its tenant's.
        number: Decides between equals: the order of coming.
        claim: What it wants.
        granted: Where it is told.
        timer: What ends its waiting, if anything does.
    """

    virtual_arrival: float
    number: int
    claim: Claim = field(compare=False)
    granted: "Future[G]" = field(compare=False)
    timer: TimerHandle | None = field(default=None, compare=False)

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.claim.ticket.tenant.name


@dataclass(slots=True)
class _Share(Generic[G]):
    """One tenant's waiters, in their order."""

    weight: float
    waiters: list[Waiter[G]] = field(default_factory=list)
    sequences: int = 0
    tokens: int = 0


class FairQueue(Generic[G]):
    """Tenants in turn by what they were served; each tenant's requests by priority and age.

    A request of high priority goes before all of lower ones, until those have
    waited for `PRIORITY_SECONDS` for each unit between: then they are as good
    as it. So the tenants whose turn it may be are those whose first has come
    to the highest priority that anybody waits with.

    Args:
        counters: What tenants were served.
    """

    def __init__(self, counters: TenantCounters) -> None:
        self._counters = counters
        self._shares: dict[str, _Share[G]] = {}
        self._priorities: Counter[int] = Counter()
        self.tokens = 0

    def __len__(self) -> int:
        return self._priorities.total()

    def __contains__(self, waiter: Waiter[G]) -> bool:
        share = self._shares.get(waiter.tenant)
        if share is None:
            return False
        i = bisect.bisect_left(share.waiters, waiter)
        return i < len(share.waiters) and share.waiters[i] is waiter

    @property
    def tenants(self) -> int:
        """How many tenants wait."""
        return len(self._shares)

    def sequences(self, tenant: str) -> int:
        """Returns how many sequences a tenant waits with."""
        share = self._shares.get(tenant)
        return share.sequences if share else 0

    def all(self) -> list[Waiter[G]]:
        """Returns all who wait."""
        return [waiter for share in self._shares.values() for waiter in share.waiters]

    def push(self, waiter: Waiter[G]) -> None:
        """Has one wait."""
        share = self._shares.get(waiter.tenant)
        if share is None:
            self._counters.join(waiter.tenant, self._shares)
            share = self._shares[waiter.tenant] = _Share(waiter.claim.ticket.tenant.weight)
        bisect.insort(share.waiters, waiter)
        share.sequences += waiter.claim.ticket.sequences
        share.tokens += waiter.claim.tokens
        self.tokens += waiter.claim.tokens
        self._priorities[waiter.claim.ticket.priority] += 1

    def remove(self, waiter: Waiter[G]) -> None:
        """Forgets one who waits."""
        share = self._shares[waiter.tenant]
        del share.waiters[bisect.bisect_left(share.waiters, waiter)]
        share.sequences -= waiter.claim.ticket.sequences
        share.tokens -= waiter.claim.tokens
        self.tokens -= waiter.claim.tokens
        if not share.waiters:
            del self._shares[waiter.tenant]
        priority = waiter.claim.ticket.priority
        self._priorities[priority] -= 1
        if not self._priorities[priority]:
            del self._priorities[priority]

    def first(self, now: float) -> Waiter[G] | None:
        """Returns the one who goes next, or None if nobody waits."""
        if not self._shares:
            return None
        if len(self._shares) == 1:
            (share,) = self._shares.values()
            return share.waiters[0]
        heads = {name: share.waiters[0].virtual_arrival for name, share in self._shares.items()}
        eligible_before = max(now - max(self._priorities) * PRIORITY_SECONDS, min(heads.values()))
        eligible = (name for name, arrival in heads.items() if arrival <= eligible_before)
        name = self._counters.next(eligible)
        return self._shares[name].waiters[0]

    def displaced(self, newcomer: Waiter[G], requests: int, tokens: int) -> list[Waiter[G]] | None:
        """Returns who is to leave so that a newcomer can wait; None if that is the newcomer.

        Always the last of the tenant that burdens the queue the most for its
        weight, so that nobody's flood keeps others out. Those moved stay.

        Args:
            newcomer: One who is not in the queue.
            requests: How many must leave at least.
            tokens: How many tokens must leave with them at least.
        """
        ticket = newcomer.claim.ticket
        weights = {name: share.weight for name, share in self._shares.items()}
        burdens = {name: share.tokens for name, share in self._shares.items()}
        weights[newcomer.tenant] = ticket.tenant.weight
        burdens[newcomer.tenant] = burdens.get(newcomer.tenant, 0) + newcomer.claim.tokens
        tails = {name: list(share.waiters) for name, share in self._shares.items()}
        leaving: list[Waiter[G]] = []
        while requests > len(leaving) or tokens > sum(w.claim.tokens for w in leaving):
            heaviest = max(burdens, key=lambda name: burdens[name] / weights[name])
            tail = tails.get(heaviest)
            if not tail or tail[-1].claim.ticket.moved:
                return None
            if heaviest == newcomer.tenant and tail[-1] < newcomer:
                return None
            leaving.append(tail.pop())
            burdens[heaviest] -= leaving[-1].claim.tokens
        return leaving

    def ahead(self, newcomer: Waiter[G]) -> float:
        """Returns the tokens of those who go before one who is not in the queue, about.

        Its own tenant's before it; and of each other tenant's as many as that
        can have until it has been served as much.
        """
        if not self._shares:
            return 0.0
        tenant, counters = newcomer.claim.ticket.tenant, self._counters
        own = self._shares.get(tenant.name)
        level = counters[tenant.name]
        if own is None:
            level = max(level, min(counters[name] for name in self._shares))
        before = _before(own, newcomer) if own else 0.0
        level += before / tenant.weight
        urgent = newcomer.claim.ticket.priority > max(self._priorities)
        others = 0.0
        for name, share in self._shares.items():
            if share is not own:
                lead = max(level - counters[name], 0.0) * share.weight
                others += min(_before(share, newcomer) if urgent else share.tokens, lead)
        return before + others


def _before(share: _Share[G], newcomer: Waiter[G]) -> float:
    """Returns the tokens of those in a share who came before one, by their number."""
    place = bisect.bisect_left(share.waiters, newcomer)
    return share.tokens * place / len(share.waiters)
