"""From the core's thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from octavo.engine.events import Event, Load, PrefixChange

log = structlog.get_logger(__name__)


class Handover:
    """Gives the event loop what the core tells, in order, and in one go however much it is.

    A loop that is behind, as with many sessions or too few CPUs, is told of
    many steps as if they were one. A call into it for each step would wait in
    its queue without end, and so would what the calls carry.

    Args:
        loop: the event loop.
        spread: called in it with each change of the prefix cache.
        distribute: called in it with events, after the changes of their steps,
            and the newest load.
        fail: called in it after an exception in either: what they were to hand over is
            lost, so no session can go on.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        spread: Callable[[PrefixChange], None],
        distribute: Callable[[list[Event], Load], None],
        fail: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._spread = spread
        self._distribute = distribute
        self._fail = fail
        self._told: deque[PrefixChange | tuple[list[Event], Load]] = deque()
        self._called = False

    def publish(self, change: PrefixChange) -> None:
        """Called by the core's thread before the `deliver` of the same step."""
        self._told.append(change)

    def deliver(self, events: list[Event], load: Load) -> None:
        """Called by the core's thread after every step."""
        self._told.append((events, load))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._called = False  # first: what comes from now on has a call of its own
        try:
            self._hand_over()
        except Exception:
            log.exception("events lost on their way to the sessions")
            self._told.clear()  # all of it is for sessions that end now
            self._fail()

    def _hand_over(self) -> None:
        events: list[Event] = []
        load = None
        while self._told:
            told = self._told.popleft()
            if isinstance(told, PrefixChange):
                self._spread(told)
            else:
                events += told[0]
                load = told[1]
        if load is not None:
            self._distribute(events, load)
