"""A server in a child process, which reports to its parent and ends with it."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Literal, Self

import structlog

from octavo.cli.running import EXPECTED, StartError, run_loop
from octavo.common.background import call_in_thread
from octavo.common.child_end import why_it_ended
from octavo.common.resources import oom_kills
from octavo.common.shutdown import (
    StoppedWhileStartingError,
    end_tree,
    exit_at_once,
    exit_on_signals,
)

log = structlog.get_logger(__name__)

PR_SET_PDEATHSIG = 1
STOP_SECONDS = 5.0
"""Seconds after the drain timeout before a child is killed."""

Report = Callable[[str], None]
"""Reports to the parent that a stage of the start is complete."""


class ChildProcess:
    """Start a server in a new process; stop it on exit.

    Args:
        target: Function that receives `arguments`, the pipe for `run_child` and this process's id.
        arguments: The first arguments of `target`.
        name: Name in errors, such as "the engine".
        process_name: Name in process lists.
        drain_timeout: Seconds for requests to finish after SIGTERM.
        remedy: Advice if the kernel kills the process for lack of memory.
    """

    def __init__(
        self,
        target: Callable[..., None],
        arguments: tuple[object, ...],
        *,
        name: str,
        process_name: str,
        drain_timeout: float,
        remedy: str,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._name = name
        self._drain_timeout = drain_timeout
        self._remedy = remedy
        self._reports, self._child_end = spawn.Pipe(duplex=False)
        self._oom_kills = oom_kills()
        self._ready = False
        self._process = spawn.Process(
            target=target, args=(*arguments, self._child_end, os.getpid()), name=process_name
        )

    def start(self) -> None:
        """Start the process, in the main thread: the kernel kills it when that thread ends."""
        with _interrupts_blocked():
            self._process.start()
        self._child_end.close()  # so that the pipe closes when the child dies

    @property
    def pid(self) -> int | None:
        """Id of the process; None before the start."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    async def report(self) -> str:
        """Wait for the next report of the child's start.

        Raises:
            StartError: The server failed to start.
        """
        try:
            kind, text = await call_in_thread(self._reports.recv)
        except EOFError:
            await self.ended()
            raise StartError(f"{self._name} died while starting ({self.end()})") from None
        if kind == "failed":
            raise StartError(f"{self._name} cannot start: {text}")
        return str(text)

    async def ready(self) -> str:
        """Wait for the last report, the server's address; from then on, SIGTERM drains it.

        Raises:
            StartError: The server failed to start.
        """
        address = await self.report()
        self._ready = True
        return address

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await call_in_thread(self._process.join)

    def check(self) -> None:
        """Check that the process is alive.

        Raises:
            StartError: The process has ended; the message has the exit code or signal.
        """
        if self._process.is_alive():
            return
        why = self.end()
        with contextlib.suppress(EOFError):
            if self._reports.poll():
                why = f"{why}: {self._reports.recv()[1]}"
        raise StartError(f"{self._name} ended unexpectedly ({why})")

    def begin_to_stop(self) -> None:
        """Send SIGTERM.

        A server that is not ready is killed at once: it has nothing to drain, and a thread that
        loads a model or compiles would delay its end.
        """
        if self.pid is None or not self._process.is_alive():
            return
        if self._ready:
            self._process.terminate()
        else:
            end_tree(self.pid)

    def stop(self) -> None:
        """Send SIGTERM unless `begin_to_stop` has, wait for the drain timeout, then kill."""
        self.begin_to_stop()
        self._process.join(self._drain_timeout + STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def end(self) -> str:
        """Return the signal or exit code that ended the process, with advice."""
        return why_it_ended(self._process.exitcode or 0, self._oom_kills, self._remedy)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT within a block, also in processes started there.

    Otherwise ctrl-C also reaches a child, which prints a traceback during its imports.
    """
    resource_tracker.ensure_running()  # if started later, it would unblock SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def begin_child(parent: int) -> None:
    """Prepare a child process: end with the parent, and ignore ctrl-C."""
    _die_with(parent)
    os.setpgid(0, 0)  # the parent handles ctrl-C, and drains in order
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # also drops a pending one
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def run_child(
    serve: Callable[[Report], Coroutine[Any, Any, None]], reports: Connection, failed: str
) -> None:
    """Serve until SIGTERM in a child; report the stages of the start, or a failure.

    Args:
        serve: Runs the server.
        reports: The pipe to the parent.
        failed: Log event of an unexpected failure.
    """

    def report(kind: Literal["done", "failed"], text: str) -> None:
        reports.send((kind, text))

    try:
        with exit_on_signals():
            run_loop(serve(lambda text: report("done", text)))
    except EXPECTED as error:
        log.debug("traceback of the next error", exc_info=True)
        report("failed", str(error))
        sys.exit(1)
    except StoppedWhileStartingError as error:
        exit_at_once(error.code)
    except Exception as error:
        log.exception(failed)
        report("failed", f"{error}" or type(error).__name__)
        sys.exit(1)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), signal.SIGKILL)
