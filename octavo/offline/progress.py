"""The progress of many requests, on a terminal."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """A bar with rates on standard error; nothing if that is no terminal.

    Args:
        total: Number of results; None if unknown.
        shown: Whether to show it at all.
    """

    def __init__(self, total: int | None, *, shown: bool) -> None:
        console = Console(stderr=True)
        self._bar = Bar(
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[rates]}"),
            console=console,
            disable=not (shown and console.is_terminal),
            transient=True,
        )
        self._task = self._bar.add_task("", total=total, rates="")
        self._began = time.monotonic()
        self._prompt_tokens = self._output_tokens = 0

    def add(self, count: int, prompt_tokens: int, output_tokens: int) -> None:
        """Count results, and their tokens."""
        self._prompt_tokens += prompt_tokens
        self._output_tokens += output_tokens
        seconds = max(time.monotonic() - self._began, 1e-9)
        rates = (
            f"prompts {self._prompt_tokens / seconds:.0f}, "
            f"outputs {self._output_tokens / seconds:.0f} tokens/s"
        )
        self._bar.update(self._task, advance=count, rates=rates)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
