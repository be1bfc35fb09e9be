"""The queue of requests that wait for one model's engines, and the order of tenants' turns.

This is the virtual token counter of "Fairness in Serving Large Language Models" (Sheng et al., OSDI
2024), with weights. A tenant's counter is its weighted tokens served, divided by the tenant's
weight; the lowest counter is served next. When an idle tenant returns, its counter is raised to the
lowest of the waiting tenants, less CREDIT_TOKENS: so unused share is saved only up to this credit.

So the counters of two tenants that always have waiting requests differ by at most one request's
charge, the credit, and the forecast error of running requests (measured: 0.2% in 42 s).

The least served active tenant starts at once, in slots reserved for it (`reserved_slots`). If all
tenants wait, each is the least served in turn, and no slot stays empty.
"""

import bisect
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

from octavo.common.priority import PRIORITY_SECONDS
from octavo.router.admission.claims import Claim
from octavo.router.admission.rates import RECENT_SECONDS
from octavo.router.admission.reserved_slots import RECENT_REQUESTS, bursts
from octavo.router.tenants.tenant import Tenant

E = TypeVar("E")

_order = attrgetter("order")

CREDIT_TOKENS = 4096.0
"""Maximum credit of an idle tenant, in weighted tokens."""


@dataclass(slots=True)
class _Share(Generic[E]):
    """One tenant's claims, in order."""

    weight: float
    claims: list[Claim[E]] = field(default_factory=list)
    sequences: int = 0
    tokens: int = 0

    def place(self, claim: Claim[E]) -> int:
        """Return the number of the tenant's claims before `claim`."""
        return bisect.bisect_left(self.claims, claim.order, key=_order)


class FairQueue(Generic[E]):
    """A queue in which tenants take turns by service received, and requests by priority and age.

    Each unit of priority equals `PRIORITY_SECONDS` of waiting: after that time, a request has
    caught up with one of higher priority. A tenant is eligible if its first request has caught up
    with the highest waiting priority.
    """

    def __init__(self) -> None:
        self._served: defaultdict[str, float] = defaultdict(float)
        self._turns: defaultdict[str, int] = defaultdict(int)  # number of its last turn
        self._turn = 0
        self._last = ""  # tenant of the last turn
        # Times and numbers of sequences of each active tenant's newest requests.
        self._recent: dict[str, deque[tuple[float, int]]] = {}
        self._weights: dict[str, float] = {}
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
        """Number of tenants with waiting requests."""
        return len(self._shares)

    def sequences(self, tenant: str) -> int:
        """Return the number of a tenant's waiting sequences."""
        share = self._shares.get(tenant)
        return share.sequences if share else 0

    def position(self, claim: Claim[E]) -> int:
        """Return a waiting claim's position by priority and age, from 1."""
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

        Each is the last claim of the tenant with the most waiting tokens per weight, so that one
        tenant's flood cannot keep others out. Migrated requests are never refused.

        Args:
            newcomer: A claim that is not in the queue yet.
            requests: Minimum number of claims to refuse.
            tokens: Minimum total tokens of these claims.
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
        """Estimate the tokens to serve before a claim that is not in the queue yet.

        They are those of its tenant's earlier claims, and of other tenants' claims that are served
        until the tenants' counters are equal.
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

    # Tenants' counters of service received.

    def served(self, tenant: str) -> float:
        """Return a tenant's counter of service received."""
        return self._served[tenant]

    def asked(self, tenant: Tenant, sequences: int, now: float) -> None:
        """Record a tenant's request, which makes the tenant active."""
        recent = self._recent.setdefault(tenant.name, deque(maxlen=RECENT_REQUESTS))
        recent.append((now, sequences))
        self._weights[tenant.name] = tenant.weight

    def join(self, tenant: str, waiting: Iterable[str] = ()) -> None:
        """Raise a returning tenant's counter, given the tenants that are `waiting`."""
        level = min((self._served[name] for name in waiting), default=self._served[self._last])
        self._served[tenant] = max(self._served[tenant], level - CREDIT_TOKENS)

    def _next(self, tenants: Iterable[str]) -> str:
        """Return the next tenant: the least served; among equals, the one served longest ago.

        Raises:
            ValueError: `tenants` is empty.
        """
        return min(tenants, key=lambda name: (self._served[name], self._turns[name]))

    def is_least(self, tenant: str, now: float) -> bool:
        """Return whether no active tenant was served less than this one."""
        self._forget(now)
        return all(self._served[tenant] <= self._served[name] for name in self._recent)

    def share(self, tenant: Tenant, now: float) -> float:
        """Return a tenant's share of the engines if it and all active tenants demand more.

        The tenant itself may be inactive: its last request may have waited since.
        """
        self._forget(now)
        others = sum(self._weights[name] for name in self._recent if name != tenant.name)
        return tenant.weight / (tenant.weight + others)

    def bursts_of_least(self, now: float) -> Sequence[tuple[int, float]]:
        """Return the least served active tenant's bursts."""
        self._forget(now)
        if not self._recent:
            return ()
        return bursts(tuple(self._recent[min(self._recent, key=self._served.__getitem__)]))

    def _forget(self, now: float) -> None:
        self._recent = {
            name: recent
            for name, recent in self._recent.items()
            if now - recent[-1][0] <= RECENT_SECONDS
        }

    def admit(self, claim: Claim[Any]) -> None:
        """Charge a tenant the expected cost of its request."""
        name = claim.request.tenant.name
        self._turn += 1
        self._turns[name] = self._turn
        self._last = name
        self.correct(claim)

    def correct(self, claim: Claim[Any]) -> None:
        """Charge a running request's cost beyond the expected one."""
        self._charge(claim, claim.charge)

    def settle(self, claim: Claim[Any]) -> None:
        """Replace an ended request's charge with its actual cost."""
        self._charge(claim, claim.served)

    def _charge(self, claim: Claim[Any], charge: float) -> None:
        tenant = claim.request.tenant
        self._served[tenant.name] += (charge - claim.charged) / tenant.weight
        claim.charged = charge


def _before(share: _Share[E], newcomer: Claim[E]) -> float:
    """Estimate the tokens of a tenant's claims before `newcomer`, from their number."""
    return share.tokens * share.place(newcomer) / len(share.claims)
