"""Passes events from the core's thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable

import structlog

from octavo.engine.events import Event, Load, PrefixChange

log = structlog.get_logger(__name__)


class ThreadBridge:
    """Passes the core's events to the event loop, in order.

    One call of the loop takes all pending events. With one call per step, calls would pile up in
    the queue of a loop that lags behind, as with many sessions or too few CPUs.

    Args:
        loop: The event loop.
        on_prefixes: Called in the loop with each change of the prefix cache.
        on_events: Called in the loop with events, after the prefix changes of their steps, and
            the newest load.
        on_error: Called in the loop after an exception in one of the two: their events are lost, so
            no session can continue.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        on_prefixes: Callable[[PrefixChange], None],
        on_events: Callable[[list[Event], Load], None],
        on_error: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._on_prefixes = on_prefixes
        self._on_events = on_events
        self._on_error = on_error
        self._published: deque[PrefixChange | tuple[list[Event], Load]] = deque()
        self._scheduled = False

    def publish_prefixes(self, change: PrefixChange) -> None:
        """Queue a change, in the core's thread; `publish` of the same step follows."""
        self._published.append(change)

    def publish(self, events: list[Event], load: Load) -> None:
        """Queue a step's events, in the core's thread, and wake the event loop."""
        self._published.append((events, load))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._scheduled = False  # first: later events get their own call
        try:
            self._pass_on()
        except Exception:
            log.exception("events lost on their way to the sessions")
            self._published.clear()  # pending events are only for sessions that end now
            self._on_error()

    def _pass_on(self) -> None:
        events: list[Event] = []
        load = None
        while self._published:
            published = self._published.popleft()
            if isinstance(published, PrefixChange):
                self._on_prefixes(published)
            else:
                events += published[0]
                load = published[1]
        if load is not None:
            self._on_events(events, load)
