"""Admission: gives each request an engine, queues it, or refuses it."""

import asyncio
import itertools
import time
from asyncio import TimerHandle
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic

from octavo.common import rpc
from octavo.router.admission import refusals
from octavo.router.admission.claims import AnyState, Claim
from octavo.router.admission.output_lengths import OutputLengths
from octavo.router.admission.queue import FairQueue
from octavo.router.admission.rates import Clock, DrainRate, Margin, Pace
from octavo.router.admission.refusals import QueueLimits
from octavo.router.admission.reserved_slots import reserved_slots
from octavo.router.admission.stages import E, for_stage, successors
from octavo.router.balancing.policy import Policy


class ModelQueue(Generic[E]):
    """One model's queue, and the statistics of its requests."""

    def __init__(self, clock: Clock) -> None:
        self.waiters: FairQueue[E] = FairQueue()
        self.running: set[Claim[E]] = set()
        self.sequences: Counter[str] = Counter()  # running, of each tenant
        self.lengths = OutputLengths()
        self.drain = DrainRate(clock)
        self.margin = Margin()
        self.pace = Pace(clock)
        self.outage: TimerHandle | None = None  # timer that ends an outage's grace period
        self.given_up = False  # whether that period is over


class Admission(Generic[E]):
    """Dispatches each request to an engine: at once if one has room, else from the queue.

    Args:
        candidates: Returns a model's engines that accept requests; raises UNAVAILABLE if none does.
        policy: Chooses among the engines with room.
        limits: Limits of the queues.
        outage_seconds: Seconds without any engine after which requests are refused instead of
            queued.
        clock: Monotonic clock in seconds, the one of requests' arrivals.
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
        """Tokens of waiting requests: prompts and expected outputs."""
        return sum(queue.waiters.tokens for queue in self._queues.values())

    def waiting(self, model: str) -> int:
        """Return the number of requests that wait for engines of `model`."""
        return len(self._queues[model].waiters) if model in self._queues else 0

    def expected_tokens(self, state: AnyState) -> int:
        """Return a conservative estimate of a request's tokens, prompt and outputs."""
        return self._claim(state).tokens

    async def admit(
        self, state: AnyState, on_queued: Callable[[int], Awaitable[None]] | None = None
    ) -> Claim[E]:
        """Wait for an engine; return a claim, which counts as load until `release`.

        Args:
            state: The request.
            on_queued: Called with the queue position, from 1, if the request has to wait.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED, with a retry delay, if the queue is full or the
                deadline cannot be met; UNAVAILABLE if no engine was up for `outage_seconds`.
        """
        claim, queue = self._claim(state), self._queues[state.request.model]
        queue.waiters.asked(claim.request.tenant, claim.sequences, self._clock())
        engines = self._engines(queue, claim.model)
        engine = None if queue.waiters else self._choose(queue, engines, claim)
        if engine is None:
            await self._wait(queue, claim, on_queued)
            return claim
        self._check_deadline(queue, claim)
        queue.waiters.join(claim.tenant)
        self._grant(queue, claim, engine)
        return claim

    def successor(self, claim: Claim[E]) -> E | None:
        """Return the engine at which a prefill engine's request can go on now; None if none."""
        try:
            engines = self._candidates(claim.model)
        except rpc.RpcError:
            return None
        roomy = [e for e in successors(claim.engine, engines) if _fits(e, claim)]
        return self._policy(roomy, claim)

    def hand_over(self, claim: Claim[E]) -> Claim[E] | None:
        """Return the claim at a successor, without a turn in the queue; None if none has room."""
        if (engine := self.successor(claim)) is None:
            return None
        queue, next_ = self._queues[claim.model], self._claim(claim.state)
        queue.waiters.join(next_.tenant)
        self._grant(queue, next_, engine)
        next_.since = claim.since
        return next_

    def release(self, claim: Claim[E]) -> None:
        """Remove a request from its engine, record its statistics, and dispatch others."""
        request, queue = claim.request, self._queues[claim.model]
        claim.engine.claims.remove(claim)
        queue.running.remove(claim)
        queue.sequences[claim.tenant] -= claim.sequences
        queue.waiters.settle(claim)
        queue.pace.add(claim)
        if request.min_tokens < request.max_tokens:  # else its length was fixed
            for length in claim.state.lengths:
                queue.lengths.add(length, request.max_tokens)
        self.dispatch(claim.model)

    def dispatch(self, model: str) -> None:
        """Dispatch waiting requests to engines, in order, while there is room.

        Call it whenever an engine may have room, or may have gone down.
        """
        queue = self._queues[model]
        if not queue.waiters:
            return
        try:
            engines = self._engines(queue, model)
        except rpc.RpcError as error:
            self._refuse_queue(queue, error)
            return
        if queue.waiters.tenants > 1:
            for running in queue.running:
                queue.waiters.correct(running)
        while (claim := queue.waiters.first(self._clock())) is not None:
            granted = _granted(claim)
            if granted.done():  # cancelled just now; its task will leave
                self._remove(queue, claim)
                continue
            engine = self._choose(queue, engines, claim)
            if engine is None:  # keep the order: else small requests would starve a wide one
                return
            try:
                self._check_deadline(queue, claim, before=0.0)
            except rpc.RpcError as error:
                queue.margin.missed()
                self._refuse(queue, claim, error)
                continue
            queue.margin.kept()
            queue.drain.add(claim.tokens)
            self._remove(queue, claim)
            self._grant(queue, claim, engine)
            granted.set_result(engine)

    def refuse_all(self, error: rpc.RpcError) -> None:
        """Fail all waiting requests."""
        for queue in self._queues.values():
            self._refuse_queue(queue, error)

    # Engines.

    def _engines(self, queue: ModelQueue[E], model: str) -> Sequence[E]:
        """Return the engines that accept requests; none during a short outage.

        Raises:
            rpc.RpcError: UNAVAILABLE if no engine was up for `outage_seconds`.
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
        """Refuse requests: no engine was up for `outage_seconds`."""
        self._queues[model].given_up = True
        self.dispatch(model)

    def _choose(self, queue: ModelQueue[E], engines: Sequence[E], claim: Claim[E]) -> E | None:
        """Return an engine with room for a request, or None."""
        engines = for_stage(engines, claim)
        others = [engine for engine in engines if engine is not claim.state.failed_on]
        roomy = [engine for engine in others or engines if _fits(engine, claim)]
        tenant, now = claim.request.tenant, self._clock()
        if not queue.waiters.is_least(tenant.name, now):
            share = queue.waiters.share(tenant, now) * sum(e.max_num_seqs for e in engines)
            waiting = queue.waiters.sequences(tenant.name) or claim.sequences
            if queue.sequences[tenant.name] + waiting > share:
                bursts = queue.waiters.bursts_of_least(now)
                roomy = [e for e in roomy if _has_open_slot(e, claim, queue.pace, bursts)]
        return self._policy(roomy, claim)

    def _grant(self, queue: ModelQueue[E], claim: Claim[E], engine: E) -> None:
        claim.grant(engine, self._clock())
        engine.claims.add(claim, engine.cached_tokens(claim))
        queue.running.add(claim)
        queue.sequences[claim.tenant] += claim.sequences
        queue.waiters.admit(claim)

    # Waiting.

    def _claim(self, state: AnyState) -> Claim[E]:
        return Claim(state, self._queues[state.request.model].lengths, next(self._numbers))

    async def _wait(
        self,
        queue: ModelQueue[E],
        claim: Claim[E],
        on_queued: Callable[[int], Awaitable[None]] | None,
    ) -> None:
        claim.granted = asyncio.get_running_loop().create_future()
        if not claim.migrated:
            self._check_deadline(queue, claim, queue.waiters.ahead(claim) + claim.tokens)
            self._make_room(queue, claim)
            self._set_timer(queue, claim, since=self._clock())
        queue.waiters.push(claim)
        if queue.outage is None:
            queue.drain.begin()
        if queue.waiters.first(self._clock()) is claim:
            self.dispatch(claim.model)  # reserved slots may admit it now
        try:
            if on_queued is not None and not claim.granted.done():
                await on_queued(queue.waiters.position(claim))
            await claim.granted
        except asyncio.CancelledError:
            self._leave(queue, claim)
            raise

    def _leave(self, queue: ModelQueue[E], claim: Claim[E]) -> None:
        """Remove a cancelled claim, whether it still waits or was just granted."""
        granted = _granted(claim)
        if granted.done() and not granted.cancelled() and granted.exception() is None:
            self.release(claim)  # granted just now
            return
        if claim in queue.waiters:
            self._remove(queue, claim)
        self.dispatch(claim.model)  # it may have blocked the others

    def _remove(self, queue: ModelQueue[E], claim: Claim[E]) -> None:
        if claim.timer is not None:
            claim.timer.cancel()
        queue.waiters.remove(claim)
        if not queue.waiters:
            queue.drain.end()

    def _refuse(self, queue: ModelQueue[E], claim: Claim[E], error: rpc.RpcError) -> None:
        self._remove(queue, claim)
        granted = _granted(claim)
        if not granted.done():
            granted.set_exception(error)

    def _refuse_queue(self, queue: ModelQueue[E], error: rpc.RpcError) -> None:
        for claim in list(queue.waiters):
            self._refuse(queue, claim, error)

    # Limits.

    def _make_room(self, queue: ModelQueue[E], newcomer: Claim[E]) -> None:
        """Refuse queued claims of the heaviest tenants, to make room for `newcomer`.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if the newcomer is the one to refuse.
        """
        requests = len(self) + 1 - self._limits.requests
        tokens = self.tokens + newcomer.tokens - self._limits.tokens
        if requests <= 0 and tokens <= 0:
            return
        error = refusals.queue_full(self._limits, self._half_gone(queue))
        leaving = queue.waiters.displaced(newcomer, requests, tokens)
        if leaving is None:
            raise error
        for claim in leaving:
            self._refuse(queue, claim, error)

    def _half_gone(self, queue: ModelQueue[E]) -> float | None:
        """Return the expected seconds until half of a queue is left; None if unknown.

        Clients that retry then find room, while the engines still have work.
        """
        rate = queue.drain.per_second()
        return queue.waiters.tokens / 2 / rate if rate else None

    def _check_deadline(
        self, queue: ModelQueue[E], claim: Claim[E], before: float | None = None
    ) -> None:
        """Raise if a request is expected to miss its deadline.

        Args:
            queue: The model's queue.
            claim: The request.
            before: Tokens that must leave the queue first; None if the queue is empty. If requests
                wait, estimates are conservative, as another request could use the slot in time; if
                none waits, trying costs nothing.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if it is; DEADLINE_EXCEEDED if the deadline has passed.
        """
        deadline = claim.request.deadline
        if deadline is None or claim.migrated:
            return
        rate = queue.drain.per_second()
        wait = queue.margin.value * before / rate if before and rate else 0.0
        run = queue.pace.seconds(claim.likely, safe=before is not None) or 0.0
        left = deadline - self._clock()
        if wait + run > left:
            raise refusals.too_late(wait, run, left)

    def _set_timer(self, queue: ModelQueue[E], claim: Claim[E], since: float) -> None:
        """Set the timer that refuses a claim after the maximum wait or for its deadline.

        Args:
            queue: The model's queue.
            claim: The request.
            since: Time at which the wait began.
        """
        now, deadline = self._clock(), claim.request.deadline
        due = since + self._limits.seconds
        run = queue.pace.seconds(claim.likely, safe=True)
        if deadline is not None and run is not None:
            due = min(due, deadline - run)
        loop = asyncio.get_running_loop()
        claim.timer = loop.call_later(due - now, self._expire, queue, claim, since)

    def _expire(self, queue: ModelQueue[E], claim: Claim[E], since: float) -> None:
        """Refuse a claim whose timer fired, unless shorter run times make its deadline feasible."""
        error: rpc.RpcError | None = None
        try:
            self._check_deadline(queue, claim, before=0.0)
        except rpc.RpcError as too_late:
            queue.margin.missed()
            error = too_late
        if error is None and self._clock() >= since + self._limits.seconds:
            error = refusals.waited(self._limits, self._half_gone(queue))
        if error is None:
            self._set_timer(queue, claim, since)
        else:
            self._refuse(queue, claim, error)
            self.dispatch(claim.model)


def _granted(claim: Claim[E]) -> asyncio.Future[E]:
    assert claim.granted is not None, "it does not wait"
    return claim.granted


def _has_open_slot(
    engine: E, claim: Claim[E], pace: Pace, bursts: Sequence[tuple[int, float]]
) -> bool:
    """Return whether an engine has unreserved slots for a request; an idle engine always has."""
    if not engine.sequences:
        return True
    endings = [pace.seconds(tokens) for tokens in engine.claims.to_come()]
    reserved = reserved_slots(engine.max_num_seqs, bursts, [e for e in endings if e is not None])
    return engine.sequences + claim.sequences <= engine.max_num_seqs - reserved


def _fits(engine: E, claim: Claim[E]) -> bool:
    """Return whether an engine's memory has room for a request; true for an empty engine."""
    if not engine.sequences:
        return True
    return engine.claims.fits(claim, engine.cached_tokens(claim), engine.load)
