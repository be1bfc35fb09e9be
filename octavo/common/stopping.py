"""Exit of a process that is stopped before it serves."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn


class StoppedWhileStartingError(Exception):
    """A server was stopped before it was ready."""


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """End the process at SIGTERM within a block, until an event loop handles that signal.

    Importing an engine may start compilers, which must end too.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: exit_at_once(0))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def exit_at_once(code: int) -> NoReturn:
    """End this process and its children without waiting for threads, which may take minutes."""
    import psutil  # noqa: PLC0415 - of the servers' extras

    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
