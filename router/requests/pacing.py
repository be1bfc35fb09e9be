"""Pacing: how often a stream gets a message, and how long a write may take."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

MESSAGE_SECONDS = 0.0002
"""Time set aside for each message: twice the CPU time that one costs, so that messages take
half a core at most."""
MOST_SECONDS = 0.1
"""Maximum seconds that tokens wait to be sent together with the next."""
EARLY = 0.9
"""Fraction of the interval after which tokens are sent as they come: those that come just before
its end would wait for the next ones, and those could come as the wait ends."""


def message_interval(streams: int) -> float:
    """Return the minimum seconds from one message of a stream to its next.

    A few streams get every token at once; of hundreds that get dozens of
    tokens a second each, several go in one message. The first token and the
    end never wait. Messages go when tokens come, not in between: an engine's
    step brings tokens to all of its streams, so one turn of the event loop
    writes what would take many.

    Args:
        streams: Number of streams that there are.
    """
    return min(streams * MESSAGE_SECONDS, MOST_SECONDS)


@asynccontextmanager
async def limited(
    write: Callable[[T], Awaitable[None]], seconds: float
) -> AsyncIterator[Callable[[T], Awaitable[None]]]:
    """Yield a `write` that may take `seconds` at most each time.

    One timer looks after many writes, as nearly all are over in an instant:
    it looks again and again, and a write counts that it finds going on too long.

    Raises:
        TimeoutError: A write took longer; on leaving the context.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None
    began: float | None = None

    def look() -> None:
        nonlocal timer
        timer = None
        if began is None:
            return
        due = began + seconds
        if loop.time() >= due:
            timeout.reschedule(due)
        else:
            timer = loop.call_at(due, look)

    async def write_in_time(response: T) -> None:
        nonlocal timer, began
        began = loop.time()
        timer = timer or loop.call_later(seconds, look)
        await write(response)
        began = None

    async with asyncio.timeout(None) as timeout:
        try:
            yield write_in_time
        finally:
            if timer is not None:
                timer.cancel()
