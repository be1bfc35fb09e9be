"""Collects metrics in an event loop, for threads that serve the metrics page."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.registry import Collector

from octavo.common.background import wait_for_loop

SECONDS = 4.0
"""Timeout in seconds to collect from all workers; longer than the timeout of one."""


class LoopCollector(Collector):
    """Collect metrics in an event loop, on behalf of the threads that serve the metrics page.

    Args:
        collect: Returns the metrics; runs in the event loop in which this object was created.
    """

    def __init__(self, collect: Callable[[], Coroutine[Any, Any, Iterable[Metric]]]) -> None:
        self._collect = collect
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; call it outside the event loop's thread.

        Raises:
            TimeoutError: The event loop is stopped or too busy.
        """
        yield from wait_for_loop(self._loop, self._collect(), SECONDS)
