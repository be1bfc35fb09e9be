"""The engine processes of `octavo serve`, started and stopped together."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from octavo.cli.engine_process import EngineProcess
from octavo.common.background import joined
from octavo.common.placement import Placement
from octavo.engine.settings import EngineSettings


class EngineGroup:
    """Start engines in new processes; stop them on exit.

    Args:
        settings: Settings of each engine.
        directory: Directory of the Unix sockets.
        placements: Cores and memory of each engine; empty: one engine uses everything available.
    """

    def __init__(
        self,
        settings: Sequence[EngineSettings],
        directory: Path,
        placements: Sequence[Placement] = (),
    ) -> None:
        parts: list[Placement | None] = [*placements] or [None]
        self._engines = [
            EngineProcess(each, directory / f"engine-{number}.sock", _name(number, parts), part)
            for number, (each, part) in enumerate(zip(settings, parts, strict=True))
        ]
        self._stack = ExitStack()

    @property
    def addresses(self) -> list[str]:
        """Addresses of the engines, for routers."""
        return [f"unix:{engine.socket}" for engine in self._engines]

    async def ready(self) -> None:
        """Wait until all engines accept requests.

        Raises:
            StartError: An engine failed to start.
        """
        await asyncio.gather(*(engine.ready() for engine in self._engines))

    async def ended(self) -> None:
        """Wait until any of the processes ends."""
        async with joined(*(engine.ended() for engine in self._engines)) as tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)

    def check(self) -> None:
        """Check that all processes are alive.

        Raises:
            StartError: A process has ended; the message has the exit code or signal.
        """
        for engine in self._engines:
            engine.check()

    def __enter__(self) -> Self:
        with ExitStack() as started:
            for engine in self._engines:
                started.enter_context(engine)
            self._stack = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self._engines:  # all drain at the same time
            engine.begin_to_stop()
        self._stack.close()


def _name(number: int, placements: Sequence[Placement | None]) -> str:
    """Return an engine's name for errors."""
    if len(placements) == 1:
        return "the engine"
    return f"engine {number + 1} of {len(placements)} ({placements[number]})"
