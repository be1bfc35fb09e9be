"""Wakes tasks when shared state changes."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


class News:
    """Wakes all waiting tasks whenever something has changed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def tell(self) -> None:
        """Wake all tasks that wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float | None = None) -> None:
        """Wait for the next change, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()

    async def until(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition of the shared state is true, at most `seconds`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():
                    await self.wait()
