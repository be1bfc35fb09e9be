"""The door: who goes in now, who waits, who is turned away."""

import asyncio
import itertools
import time
from asyncio import TimerHandle
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from octavo.common import rpc
from octavo.router.admission import refusals
from octavo.router.admission.claims import Claim, Claims
from octavo.router.admission.fairness import TenantCounters
from octavo.router.admission.kept_places import Span, kept_places
from octavo.router.admission.output_lengths import OutputLengths
from octavo.router.admission.queue import FairQueue, Waiter
from octavo.router.admission.rates import Clock, DrainRate, Margin, Pace
from octavo.router.admission.refusals import QueueLimits
from octavo.router.admission.ticket import Ticket
from octavo.router.balancing.policy import Candidate, Policy


class Replica(Candidate, Protocol):
    """An engine as admission sees it."""

    claims: Claims
    """What this router has given it."""


E = TypeVar("E", bound=Replica)


@dataclass(frozen=True, slots=True, eq=False)
class Grant(Generic[E]):
    """An engine for a request, until it is given back by `Admission.release`."""

    engine: E
    claim: Claim


class ModelQueue(Generic[E]):
    """One model's queue, and what is known of its requests."""

    def __init__(self, clock: Clock) -> None:
        self.counters = TenantCounters()
        self.waiters: FairQueue[Grant[E]] = FairQueue(self.counters)
        self.running: set[Claim] = set()
        self.sequences: Counter[str] = Counter()  # that run, of each tenant
        self.lengths = OutputLengths()
        self.drain = DrainRate(clock)
        self.margin = Margin()
        self.pace = Pace(clock)
        self.outage: TimerHandle | None = None  # ends the waiting, while no engine is up
        self.given_up = False  # it has


class Admission(Generic[E]):
    """Gives each request an engine: at once while one has room, else in turn.

    Args:
        candidates: The engines of a model that take requests; raises RpcError
            UNAVAILABLE if there are none.
        policy: Which of several engines it is.
        limits: How much may wait, and how long.
        outage_seconds: How long requests wait while no engine is up, from when
            the last one went; after that they are refused at once.
        clock: Tells the time in seconds, as tickets have it.
    """

    def __init__(
        self,
        candidates: Callable[[str], Sequence[E]],
        policy: Policy,
        limits: QueueLimits,
        *,
        outage_seconds: float,
        clock: Clock = time.monotonic,
    ) -> None:
        self._candidates = candidates
        self._policy = policy
        self._limits = limits
        self._outage_seconds = outage_seconds
        self._clock = clock
        self._queues: defaultdict[str, ModelQueue[E]] = defaultdict(lambda: ModelQueue(clock))
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return sum(len(queue.waiters) for queue in self._queues.values())

    @property
    def tokens(self) -> int:
        """Tokens of the prompts and expected outputs of those who wait."""
        return sum(queue.waiters.tokens for queue in self._queues.values())

    def waiting(self, model: str) -> int:
        """Returns how many requests wait for engines of `model`."""
        return len(self._queues[model].waiters) if model in self._queues else 0

    def expected_tokens(self, ticket: Ticket) -> int:
        """Returns the tokens of prompt and outputs that a request will have, on the safe side."""
        return Claim(ticket, self._queues[ticket.model].lengths).tokens

    async def admit(self, ticket: Ticket) -> Grant[E]:
        """Returns an engine, with the ticket counted on it until `release`.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED, with a time to come back, if too
                much waits already, or the ticket's deadline could not be met,
                at once or after it has waited; UNAVAILABLE if no engine has
                been up for too long.
        """
        queue = self._queues[ticket.model]
        claim = Claim(ticket, queue.lengths)
        queue.counters.asked(ticket.tenant, ticket.sequences, self._clock())
        engines = self._engines(queue, ticket.model)
        engine = None if queue.waiters else self._choose(queue, engines, claim)
        if engine is None:
            return await self._wait(queue, claim)
        self._check_deadline(queue, claim)
        queue.counters.join(ticket.tenant.name)
        return self._grant(queue, claim, engine)

    def release(self, grant: Grant[E]) -> None:
        """Takes a request off its engine, learns from it, and lets the next one go."""
        claim = grant.claim
        ticket, queue = claim.ticket, self._queues[claim.ticket.model]
        grant.engine.claims.remove(claim)
        queue.running.remove(claim)
        queue.sequences[ticket.tenant.name] -= ticket.sequences
        queue.counters.settle(claim)
        queue.pace.add(claim)
        if ticket.min_tokens < ticket.max_tokens:  # else its length says nothing of others'
            for length in ticket.progress.lengths:
                queue.lengths.add(length, ticket.max_tokens)
        self.dispatch(ticket.model)

    def dispatch(self, model: str) -> None:
        """Gives engines to those who wait, in turn, while there is room.

        Called whenever an engine may have come to have room, or to be no more.
        """
        queue = self._queues[model]
        try:
            engines = self._engines(queue, model)
        except rpc.RpcError as error:
            self._refuse_queue(queue, error)
            return
        if queue.waiters.tenants > 1:
            for claim in queue.running:
                queue.counters.correct(claim)
        while (waiter := queue.waiters.first(self._clock())) is not None:
            if waiter.granted.done():  # cancelled in this instant, and about to leave
                self._remove(queue, waiter)
                continue
            engine = self._choose(queue, engines, waiter.claim)
            if engine is None:  # those behind wait too, or a wide request would starve
                return
            try:
                self._check_deadline(queue, waiter.claim, before=0.0)
            except rpc.RpcError as error:
                queue.margin.missed()
                self._refuse(queue, waiter, error)
                continue
            queue.margin.kept()
            queue.drain.add(waiter.claim.tokens)
            self._remove(queue, waiter)
            waiter.granted.set_result(self._grant(queue, waiter.claim, engine))

    def refuse_all(self, error: rpc.RpcError) -> None:
        """Fails all who wait."""
        for queue in self._queues.values():
            self._refuse_queue(queue, error)

    # Engines.

    def _engines(self, queue: ModelQueue[E], model: str) -> Sequence[E]:
        """Returns the engines that take requests; none, while that may be for a moment.

        Raises:
            rpc.RpcError: UNAVAILABLE if none has been up for too long.
        """
        try:
            engines = self._candidates(model)
        except rpc.RpcError:
            if queue.outage is None:
                loop = asyncio.get_running_loop()
                queue.outage = loop.call_later(self._outage_seconds, self._give_up, model)
                queue.drain.end()
            if queue.given_up:
                raise
            return ()
        if queue.outage is not None:
            queue.outage.cancel()
            queue.outage, queue.given_up = None, False
        if queue.waiters:
            queue.drain.begin()
        return engines

    def _give_up(self, model: str) -> None:
        """No engine has been up for too long: whoever wants one hears so from now on."""
        self._queues[model].given_up = True
        self.dispatch(model)

    def _choose(self, queue: ModelQueue[E], engines: Sequence[E], claim: Claim) -> E | None:
        """Returns an engine with room, or None."""
        others = [engine for engine in engines if engine is not claim.ticket.avoid]
        roomy = [engine for engine in others or engines if _fits(engine, claim)]
        tenant, now = claim.ticket.tenant, self._clock()
        if not queue.counters.is_least(tenant.name, now):
            share = queue.counters.share(tenant, now) * sum(e.max_num_seqs for e in engines)
            waiting = queue.waiters.sequences(tenant.name) or claim.ticket.sequences
            if queue.sequences[tenant.name] + waiting > share:
                spans = queue.counters.demand_of_least(now)
                roomy = [e for e in roomy if _has_open_place(e, claim, queue.pace, spans)]
        return self._policy.choose(roomy, claim.ticket)

    def _grant(self, queue: ModelQueue[E], claim: Claim, engine: E) -> Grant[E]:
        claim.since = self._clock()
        engine.claims.add(claim, _cached_tokens(engine, claim.ticket))
        queue.running.add(claim)
        queue.sequences[claim.ticket.tenant.name] += claim.ticket.sequences
        queue.counters.admit(claim)
        return Grant(engine, claim)

    # Waiting.

    async def _wait(self, queue: ModelQueue[E], claim: Claim) -> Grant[E]:
        granted: asyncio.Future[Grant[E]] = asyncio.get_running_loop().create_future()
        waiter = Waiter(claim.ticket.virtual_arrival, next(self._numbers), claim, granted)
        if not claim.ticket.moved:
            self._check_deadline(queue, claim, queue.waiters.ahead(waiter) + claim.tokens)
            self._make_room(queue, waiter)
            self._set_timer(queue, waiter, since=self._clock())
        queue.waiters.push(waiter)
        if queue.outage is None:
            queue.drain.begin()
        if queue.waiters.first(self._clock()) is waiter:
            self.dispatch(claim.ticket.model)  # what is kept from others may be for it
        try:
            return await granted
        except asyncio.CancelledError:
            self._leave(queue, waiter)
            raise

    def _leave(self, queue: ModelQueue[E], waiter: Waiter[Grant[E]]) -> None:
        """Forgets one who no longer waits, wherever that found it."""
        granted = waiter.granted
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self.release(granted.result())  # granted in the same instant
            return
        if waiter in queue.waiters:
            self._remove(queue, waiter)
        self.dispatch(waiter.claim.ticket.model)  # it may be the one that all waited behind

    def _remove(self, queue: ModelQueue[E], waiter: Waiter[Grant[E]]) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
        queue.waiters.remove(waiter)
        if not queue.waiters:
            queue.drain.end()

    def _refuse(self, queue: ModelQueue[E], waiter: Waiter[Grant[E]], error: rpc.RpcError) -> None:
        self._remove(queue, waiter)
        if not waiter.granted.done():
            waiter.granted.set_exception(error)

    def _refuse_queue(self, queue: ModelQueue[E], error: rpc.RpcError) -> None:
        for waiter in queue.waiters.all():
            self._refuse(queue, waiter, error)

    # Limits.

    def _make_room(self, queue: ModelQueue[E], newcomer: Waiter[Grant[E]]) -> None:
        """Has others leave a full queue, if they burden it more.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if it is the newcomer that has to.
        """
        requests = len(self) + 1 - self._limits.requests
        tokens = self.tokens + newcomer.claim.tokens - self._limits.tokens
        if requests <= 0 and tokens <= 0:
            return
        error = refusals.queue_full(self._limits, self._half_gone(queue))
        leaving = queue.waiters.displaced(newcomer, requests, tokens)
        if leaving is None:
            raise error
        for waiter in leaving:
            self._refuse(queue, waiter, error)

    def _half_gone(self, queue: ModelQueue[E]) -> float | None:
        """Returns the seconds until half of a queue will have gone, if that can be told.

        By then there is room, and the engines still have work.
        """
        rate = queue.drain.per_second()
        return queue.waiters.tokens / 2 / rate if rate else None

    def _check_deadline(
        self, queue: ModelQueue[E], claim: Claim, before: float | None = None
    ) -> None:
        """Checks that a request can be complete by its deadline, as far as can be told.

        Args:
            queue: Where it is.
            claim: The request.
            before: Tokens that must leave the queue for it to have an engine;
                None where nobody waits. Where others wait, a place is for those
                who will surely make it; where nobody does, nothing is lost by
                trying.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if it cannot; DEADLINE_EXCEEDED if
                that has passed.
        """
        deadline = claim.ticket.deadline
        if deadline is None or claim.ticket.moved:
            return
        rate = queue.drain.per_second()
        wait = queue.margin.value * before / rate if before and rate else 0.0
        run = queue.pace.seconds(claim.likely, safe=before is not None) or 0.0
        left = deadline - self._clock()
        if wait + run > left:
            raise refusals.too_late(wait, run, left)

    def _set_timer(self, queue: ModelQueue[E], waiter: Waiter[Grant[E]], since: float) -> None:
        """Has a waiter leave when it has waited too long, or can no longer meet its deadline.

        Args:
            queue: Where it waits.
            waiter: It.
            since: When it began to.
        """
        now, deadline = self._clock(), waiter.claim.ticket.deadline
        due = since + self._limits.seconds
        run = queue.pace.seconds(waiter.claim.likely, safe=True)
        if deadline is not None and run is not None:
            due = min(due, deadline - run)
        loop = asyncio.get_running_loop()
        waiter.timer = loop.call_later(due - now, self._expire, queue, waiter, since)

    def _expire(self, queue: ModelQueue[E], waiter: Waiter[Grant[E]], since: float) -> None:
        """Its time has come; not so, if requests are faster now than when that was set."""
        error: rpc.RpcError | None = None
        try:
            self._check_deadline(queue, waiter.claim, before=0.0)
        except rpc.RpcError as too_late:
            queue.margin.missed()
            error = too_late
        if error is None and self._clock() >= since + self._limits.seconds:
            error = refusals.waited(self._limits, self._half_gone(queue))
        if error is None:
            self._set_timer(queue, waiter, since)
        else:
            self._refuse(queue, waiter, error)
            self.dispatch(waiter.claim.ticket.model)


def _cached_tokens(engine: Replica, ticket: Ticket) -> int:
    return engine.cached_tokens(ticket.prompt) if ticket.prompt else 0


def _has_open_place(engine: Replica, claim: Claim, pace: Pace, spans: Sequence[Span]) -> bool:
    """Says whether an engine has places that are not kept; an empty one has."""
    if not engine.sequences:
        return True
    endings = [pace.seconds(tokens) for tokens in engine.claims.to_come()]
    kept = kept_places(engine.max_num_seqs, spans, [e for e in endings if e is not None])
    return engine.sequences + claim.ticket.sequences <= engine.max_num_seqs - kept


def _fits(engine: Replica, claim: Claim) -> bool:
    """Says whether an engine's memory has room for a request; an empty one always has."""
    if not engine.sequences:
        return True
    cached_tokens = _cached_tokens(engine, claim.ticket)
    return engine.claims.fits(claim, cached_tokens, engine.load)
