"""Signals that stop a server, and its exit code if stopped before it serves."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after ctrl-C, 128 + SIGINT."""
EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: INTERRUPTED}
"""Exit codes of a process that a signal stops before it serves."""


class StoppedWhileStartingError(Exception):
    """A server was stopped before it was ready.

    Attributes:
        code: Exit code of the process.
    """

    def __init__(self, number: signal.Signals = signal.SIGTERM) -> None:
        super().__init__(f"stopped by {number.name}")
        self.code = EXIT_CODES[number]


@dataclass(slots=True)
class ShutdownSignals:
    """The signals that stop a server: the first one drains it, the second stops it at once.

    Attributes:
        came: Received signals.
        first: Event that the first signal sets.
        second: Event that the second signal sets.
    """

    came: list[signal.Signals] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    second: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, number: signal.Signals) -> None:
        """Record a received signal."""
        self.came.append(number)
        (self.second if self.first.is_set() else self.first).set()


@contextmanager
def shutdown_signals() -> Iterator[ShutdownSignals]:
    """Handle SIGTERM and SIGINT in a block, in which only this event loop may run."""
    loop, signals = asyncio.get_running_loop(), ShutdownSignals()
    for number in EXIT_CODES:
        loop.add_signal_handler(number, signals.note, number)
    try:
        yield signals
    finally:
        for number in EXIT_CODES:
            loop.remove_signal_handler(number)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """End the process at SIGTERM and SIGINT within a block, until an event loop handles them.

    Importing an engine may compile kernels, and the compilers must end too. An ignored SIGINT stays
    ignored.
    """
    before = {number: signal.getsignal(number) for number in EXIT_CODES}
    for number, code in EXIT_CODES.items():
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, partial(_exit, code))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(code: int, *_: object) -> NoReturn:
    exit_at_once(code)


def end_tree(pid: int) -> None:
    """Kill a process and its descendants; ignore those that have ended."""
    import psutil  # noqa: PLC0415 - in the servers' extras

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (*process.children(recursive=True), process):
            with suppress(psutil.Error):
                member.kill()


def exit_at_once(code: int) -> NoReturn:
    """End this process and its children at once, without waiting for threads."""
    import psutil  # noqa: PLC0415 - in the servers' extras

    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    for stream in (sys.stdout, sys.stderr):
        # RuntimeError: the signal interrupted a write to the stream.
        with suppress(OSError, ValueError, RuntimeError):
            stream.flush()
    os._exit(code)
