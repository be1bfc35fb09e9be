"""Ending a process that is told to stop before it serves."""

import os
import sys
from contextlib import suppress
from typing import NoReturn

import psutil


class StoppedWhileStartingError(Exception):
    """A server was told to stop before it was ready. Nothing is left to be finished."""


def exit_at_once(code: int) -> NoReturn:
    """End this process and those that it has started, compilers among them.

    Threads are not waited for: one that loads a model or waits for a compiler may take minutes.
    """
    with suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
