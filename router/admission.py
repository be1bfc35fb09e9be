"""Who goes to an engine now, and who waits: a bounded queue by priority and age."""

import asyncio
import bisect
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from octavo.common import rpc
from router.balancing.policy import Candidate, Policy
from router.balancing.prompt import Prompt
from router.tenants import ANONYMOUS, Tenant

PRIORITY_SECONDS = 10.0
"""What one unit of priority is worth, in seconds of waiting."""
RETRY_BOUNDS = (0.5, 60.0)
"""Seconds: what a refused client is told lies between these."""

E = TypeVar("E", bound=Candidate)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request's claim to an engine.

    Attributes:
        model: Which engines will do.
        sequences: How many outputs it has.
        priority: Each unit counts as `PRIORITY_SECONDS` of waiting.
        arrival: When it came, by the monotonic clock.
        moved: Whether it had an engine and lost it. It is then refused neither
            for a full queue nor for want of engines.
        prompt: Its prompt, for policies that go by it.
        tenant: Whose it is.
    """

    model: str
    sequences: int
    priority: int
    arrival: float
    moved: bool = False
    prompt: Prompt | None = None
    tenant: Tenant = ANONYMOUS

    @property
    def virtual_arrival(self) -> float:
        """Its place in the queue: first come first served within a priority, none starves."""
        return self.arrival - self.priority * PRIORITY_SECONDS


@dataclass(order=True, slots=True)
class _Waiter(Generic[E]):
    virtual_arrival: float
    number: int
    ticket: Ticket = field(compare=False)
    engine: "asyncio.Future[E]" = field(compare=False)


class CompletionRate:
    """How many requests per second leave the engines, of late."""

    WINDOW = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=256)

    def add(self) -> None:
        """Notes that a request has left its engine."""
        self._times.append(self._clock())

    def per_second(self) -> float | None:
        """Returns the rate, or None where too few have left to tell."""
        now = self._clock()
        while self._times and self._times[0] < now - self.WINDOW:
            self._times.popleft()
        if len(self._times) < 2:
            return None
        return len(self._times) / max(now - self._times[0], 1e-3)


class Admission(Generic[E]):
    """Gives each request an engine: at once while one has room, else in turn.

    Args:
        candidates: The engines of a model that take requests; raises RpcError
            UNAVAILABLE if there are none.
        max_queue_size: Most requests that wait, all models together.
        policy: Which of several engines it is.
    """

    def __init__(
        self, candidates: Callable[[str], Sequence[E]], max_queue_size: int, policy: Policy
    ) -> None:
        self._candidates = candidates
        self._policy = policy
        self._max_queue_size = max_queue_size
        self._queues: defaultdict[str, list[_Waiter[E]]] = defaultdict(list)
        self._numbers = 0
        self.completions = CompletionRate()

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def waiting(self, model: str) -> int:
        """Returns how many requests wait for engines of `model`."""
        return len(self._queues.get(model, ()))

    async def admit(self, ticket: Ticket) -> E:
        """Returns an engine with the ticket's sequences counted on it.

        The caller gives them back by `release`.

        Raises:
            rpc.RpcError: RESOURCE_EXHAUSTED if the queue is full, UNAVAILABLE
                if no engine is up, now or while waiting.
        """
        try:
            engines = self._candidates(ticket.model)
        except rpc.RpcError:
            if ticket.moved:
                return await self._wait(ticket)
            raise
        if not self.waiting(ticket.model):
            engine = self._policy.choose(engines, ticket)
            if engine is not None:
                engine.sequences += ticket.sequences
                return engine
        if len(self) >= self._max_queue_size and not ticket.moved:
            raise self._full()
        return await self._wait(ticket)

    def release(self, engine: E, ticket: Ticket) -> None:
        """Takes the ticket's sequences off the engine, whose next request may come."""
        engine.sequences -= ticket.sequences
        self.completions.add()
        self.dispatch(ticket.model)

    def dispatch(self, model: str) -> None:
        """Gives engines to those who wait, in turn, while there is room.

        Called whenever an engine may have come to have room, or to be no more.
        """
        queue = self._queues.get(model)
        while queue:
            if queue[0].engine.done():  # cancelled in this instant, and about to leave
                queue.pop(0)
                continue
            try:
                engine = self._policy.choose(self._candidates(model), queue[0].ticket)
            except rpc.RpcError as error:
                self.refuse(model, error, keep_moved=True)
                return
            if engine is None:  # those behind wait too, or a wide request would starve
                return
            waiter = queue.pop(0)
            engine.sequences += waiter.ticket.sequences
            waiter.engine.set_result(engine)

    def refuse(self, model: str, error: rpc.RpcError, *, keep_moved: bool = False) -> None:
        """Fails all who wait for `model`, but for those moved if they are to be kept."""
        kept = []
        for waiter in self._queues.pop(model, ()):
            if keep_moved and waiter.ticket.moved:
                kept.append(waiter)
            elif not waiter.engine.done():
                waiter.engine.set_exception(error)
        if kept:
            self._queues[model] = kept

    def refuse_all(self, error: rpc.RpcError) -> None:
        """Fails all who wait."""
        for model in list(self._queues):
            self.refuse(model, error)

    async def _wait(self, ticket: Ticket) -> E:
        self._numbers += 1
        future: asyncio.Future[E] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(ticket.virtual_arrival, self._numbers, ticket, future)
        bisect.insort(self._queues[ticket.model], waiter)
        try:
            return await future
        except asyncio.CancelledError:
            self._leave(waiter)
            raise

    def _leave(self, waiter: _Waiter[E]) -> None:
        """Forgets one who no longer waits, wherever that found it."""
        future, ticket = waiter.engine, waiter.ticket
        if future.done() and not future.cancelled() and future.exception() is None:
            future.result().sequences -= ticket.sequences  # granted in the same instant
        queue = self._queues.get(ticket.model, [])
        i = bisect.bisect_left(queue, waiter)
        if i < len(queue) and queue[i] is waiter:
            del queue[i]
        if not queue:
            self._queues.pop(ticket.model, None)
        self.dispatch(ticket.model)  # it may have been the one that all waited behind

    def _full(self) -> rpc.RpcError:
        """Tells to come back when half of the queue will have gone.

        By then there is room, and the engines still have work.
        """
        rate = self.completions.per_second()
        low, high = RETRY_BOUNDS
        seconds = 1.0 if rate is None else len(self) / 2 / rate
        seconds = round(min(max(seconds, low), high), 1)
        return rpc.exhausted(
            f"the queue is full ({self._max_queue_size} requests wait); "
            f"retry in {seconds:g} s, or add engines",
            seconds,
        )
