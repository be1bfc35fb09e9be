"""Pacing: how often a stream gets a message, and how long a write may take."""

import asyncio
from types import TracebackType
from typing import Self

MESSAGE_SECONDS = 0.0002
"""Time set aside for each message: twice the CPU time that one costs, so that messages take
half a core at most."""
MOST_SECONDS = 0.1
"""Maximum seconds that tokens wait to be sent together with the next."""
EARLY = 0.9
"""Fraction of the interval after which tokens are sent as they come: those that come just before
its end would wait for the next ones, and those could come as the wait ends."""


class Pacer:
    """Spaces the messages of each stream by how many streams there are.

    A few streams get every token at once; of hundreds that get dozens of
    tokens a second each, several go in one message. The first token and the
    end never wait. Messages go when tokens come, not in between: an engine's
    step brings tokens to all of its streams, so one turn of the event loop
    writes what would take many.
    """

    def __init__(self) -> None:
        self.streams = 0

    @property
    def interval(self) -> float:
        """Seconds from one message of a stream to its next, at least."""
        return min(self.streams * MESSAGE_SECONDS, MOST_SECONDS)


class WriteLimit:
    """A context that is cancelled when a write in it takes too long.

    One timer looks after many writes, as nearly all are over in an instant:
    it looks again and again, and a write counts that it finds going on too long.

    Args:
        seconds: Maximum seconds of a write.

    Raises:
        TimeoutError: A write took longer; on leaving the context.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._began: float | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._timeout.__aexit__(kind, error, traceback)

    def begin(self) -> None:
        """Note that a write begins."""
        self._began = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._seconds, self._look)

    def end(self) -> None:
        """Note that the write is over."""
        self._began = None

    def _look(self) -> None:
        self._timer = None
        if self._began is None:
            return
        due = self._began + self._seconds
        if self._loop.time() >= due:
            self._timeout.reschedule(due)
        else:
            self._timer = self._loop.call_at(due, self._look)
