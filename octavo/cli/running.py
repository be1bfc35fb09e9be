"""Progress, error output and event loop of `serve`, `router` and `engine`."""

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import typer
from rich.console import Console
from rich.panel import Panel
from rich.status import Status
from rich.table import Table

from octavo.cli.output import fail
from octavo.common.background import BackgroundError, joined
from octavo.common.descriptors import raise_limit
from octavo.common.models.errors import ModelError
from octavo.common.settings import SettingsError
from octavo.common.shutdown import (
    EXIT_CODES,
    INTERRUPTED,
    StoppedWhileStartingError,
    exit_at_once,
    exit_on_signals,
)
from octavo.common.tls import TlsError

log = structlog.get_logger(__name__)


COLLECTION_THRESHOLD = 20_000
"""Garbage collector threshold of the youngest generation: allocations minus deallocations between
collections. Python's default of 700 makes the imports a fifth slower, and slows steps."""


class StartError(Exception):
    """A server cannot start or ended unexpectedly; the message says why."""


# Errors that are reported without a traceback.
EXPECTED = (StartError, ModelError, SettingsError, TlsError, OSError)


class Progress:
    """A spinner and a panel on a terminal; log lines elsewhere and in JSON.

    Args:
        log_format: The log format; "json" logs lines on a terminal too.
    """

    def __init__(self, log_format: str) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._fancy = self._console.is_terminal and log_format == "console"
        self._status: Status | None = None
        self._started = time.monotonic()

    def stage(self, text: str) -> None:
        """Show the current stage of the start."""
        if not self._fancy:
            log.info(text)
        elif self._status is None:
            self._status = self._console.status(f"{text}…")
            self._status.start()
        else:
            self._status.update(f"{text}…")

    def ready(self, title: str, facts: dict[str, str]) -> None:
        """Show that the server is ready, and the start time; call `settle`."""
        settle()
        seconds = time.monotonic() - self._started
        self.close()
        if not self._fancy:
            log.info(title, **facts, seconds=round(seconds, 2))
            return
        table = Table.grid(padding=(0, 2))
        for name, value in {**facts, "ready after": f"{seconds:.1f} s"}.items():
            table.add_row(f"[dim]{name}[/]", f"[bold]{value}[/]")
        self._console.print(Panel(table, title=title, expand=False, border_style="green"))

    def close(self) -> None:
        """Stops the spinner."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def settle() -> None:
    """Exclude the objects of a started server from garbage collection.

    A full collection visits all 250,000 objects of an engine in 0.1 to 0.3 s, during which nothing
    is served. `run_loop` undoes it at the end.
    """
    gc.freeze()


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a server in a new event loop with rare garbage collection; then undo `settle`."""
    import uvloop  # noqa: PLC0415 - in the servers' extras

    ordinary = gc.get_threshold()
    gc.set_threshold(COLLECTION_THRESHOLD, *ordinary[1:])
    try:
        uvloop.run(main)
    finally:
        gc.set_threshold(*ordinary)
        gc.unfreeze()


async def unless_stopped(main: Coroutine[Any, Any, None]) -> None:
    """Run `main`; SIGTERM or SIGINT cancels it until it handles these signals itself.

    Raises:
        StoppedWhileStartingError: A signal arrived.
    """
    async with joined(main, names=("main",), expected=(Exception,)) as (task,):
        stopped: list[signal.Signals] = []

        def stop(number: signal.Signals) -> None:
            stopped.append(number)
            task.cancel()

        for number in EXIT_CODES:
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await asyncio.wait({task})
        if stopped:
            raise StoppedWhileStartingError(stopped[0])
        task.result()


def run(main: Callable[[Progress], Coroutine[Any, Any, None]], log_format: str) -> None:
    """Run a server until it ends; expected errors become exit code 1."""
    progress = Progress(log_format)
    raise_limit()
    try:
        with exit_on_signals():
            run_loop(main(progress))
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except EXPECTED as error:
        progress.close()
        log.debug("traceback of the next error", exc_info=True)
        raise fail(f"{error}" or type(error).__name__) from None
    except BackgroundError as error:
        progress.close()
        log.exception("ended unexpectedly")
        raise fail(str(error)) from None
    except StoppedWhileStartingError as error:
        progress.close()
        exit_at_once(error.code)
    finally:
        progress.close()
