"""Metrics that an event loop collects for the threads that serve them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from octavo.common.background import wait_for_loop

SECONDS = 4.0
"""Seconds to ask all workers; each has fewer."""


class LoopCollector(Collector):
    """Collects metrics in an event loop for the threads that serve them.

    Args:
        collect: Returns the metrics; runs in the event loop that makes this object.
    """

    def __init__(self, collect: Callable[[], Awaitable[Iterable[Metric]]]) -> None:
        self._collect = collect
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; not in the event loop's own thread.

        Raises:
            TimeoutError: The event loop does not run, or is too busy.
        """

        async def run() -> Iterable[Metric]:
            return await self._collect()

        yield from wait_for_loop(self._loop, run(), SECONDS)
