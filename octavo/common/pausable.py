"""Calls that pause wherever they allow it, and continue when they are told to."""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

from octavo.common.background import start_thread

_Result = TypeVar("_Result")
_running: ContextVar["PausableCall[Any] | None"] = ContextVar("pausable_call", default=None)


class CallEndedError(BaseException):
    """Ends a paused call that nobody waits for; no handler of errors may catch it."""


class PausableCall(Generic[_Result]):
    """A call of a function that pauses at `pause_point` when its time is up.

    The function has a thread of its own, which runs only during `run`. So it takes turns with its
    caller, as a generator does, and code that it calls may pause without being written for it.

    Args:
        function: The function.
        name: The thread's name.
    """

    def __init__(self, function: Callable[[], _Result], name: str) -> None:
        self._function = function
        self._name = name
        self._turn, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread: threading.Thread | None = None
        self._until = 0.0
        self._ending = False
        self._result: list[_Result] = []
        self._error: BaseException | None = None

    def run(self, seconds: float) -> list[_Result]:
        """Continue the call for some time.

        Args:
            seconds: The time.

        Returns:
            Its result in a list; an empty one if it is paused.

        Raises:
            BaseException: The function raised it.
        """
        self._until = time.perf_counter() + seconds
        if self._thread is None:
            self._thread = start_thread(self._main, self._name)
        else:
            self._turn.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error
        return self._result

    def end(self) -> None:
        """End the call where it is paused."""
        if self._thread is not None and not self._result and self._error is None:
            self._ending = True
            self._turn.release()
            self._thread.join()

    def _main(self) -> None:
        _running.set(self)
        try:
            _use_all_cpus()
            self._result = [self._function()]
        except BaseException as error:  # noqa: BLE001 - raised to the caller
            self._error = error
        self._paused.release()

    def _pause_if_due(self) -> None:
        if time.perf_counter() >= self._until:
            self._paused.release()
            self._turn.acquire()
            if self._ending:
                raise CallEndedError


def pause_point(*_: object) -> None:
    """Pause the pausable call that runs this, if its time is up; else do nothing."""
    if (call := _running.get()) is not None:
        call._pause_if_due()  # noqa: SLF001 - of this module


def _use_all_cpus() -> None:
    """Let this thread use all CPUs of the process; it inherits those of the thread that made it."""
    with suppress(AttributeError, OSError):  # not Linux, or forbidden by a sandbox
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))
