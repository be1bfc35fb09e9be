"""Passes events from the core's thread to the event loop."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import structlog

from octavo.engine.events import PrefixChange, Publish, StepOutput
from octavo.v1.engine_pb2 import Load

log = structlog.get_logger(__name__)


def thread_bridge(
    loop: asyncio.AbstractEventLoop, on_events: Publish, on_error: Callable[[], None]
) -> Publish:
    """Return a function that passes the core's events to the event loop, in order.

    One call of the loop takes all pending events. With one call per step, calls would pile up in
    the queue of a loop that lags behind, as with many sessions or too few CPUs.

    Args:
        loop: The event loop.
        on_events: Called in the loop with all that was published.
        on_error: Called in the loop after an exception in `on_events`: events are
            lost, so no session can continue.
    """
    published: deque[Callable[[], None]] = deque()
    scheduled = False

    def publish(
        outputs: Mapping[int, StepOutput], changes: Sequence[PrefixChange], load: Load
    ) -> None:
        nonlocal scheduled
        published.append(partial(on_events, outputs, changes, load))
        if not scheduled:
            scheduled = True
            loop.call_soon_threadsafe(take)

    def take() -> None:
        nonlocal scheduled
        scheduled = False  # first: later events get their own call
        try:
            while published:
                published.popleft()()
        except Exception:
            log.exception("events lost on their way to the sessions")
            published.clear()  # pending events are only for sessions that end now
            on_error()

    return publish
