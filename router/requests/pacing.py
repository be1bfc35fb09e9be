"""Pacing: how often a stream sends a message, and how long a write may take."""

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
"""Fraction of the interval after which tokens are sent at once: otherwise tokens just before its
end would wait for the next, which may come just after it."""


def message_interval(streams: int) -> float:
    """Return the minimum seconds between two messages of a stream.

    With few streams, every token is sent at once; with hundreds of fast ones, a message holds
    several tokens. The first token and the end never wait. Messages are sent when tokens arrive, as
    an engine's step brings tokens for all of its streams: with a timer per stream, a token cost 132
    us of CPU time instead of 85 (benchmarks/results/router.md).

    Args:
        streams: Number of open streams.
    """
    return min(streams * MESSAGE_SECONDS, MOST_SECONDS)


@asynccontextmanager
async def limited(
    write: Callable[[T], Awaitable[None]], seconds: float
) -> AsyncIterator[Callable[[T], Awaitable[None]]]:
    """Yield a `write` that may take at most `seconds` each time.

    One periodic timer serves many writes, as nearly all end at once; it cancels a write that it
    finds too old.

    Raises:
        TimeoutError: A write took longer; raised on leaving the context.
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
