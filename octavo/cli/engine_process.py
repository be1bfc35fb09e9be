"""An engine process of `octavo serve`, which ends when its parent ends."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import structlog

from octavo.cli.engine import run_engine
from octavo.cli.running import EXPECTED, StartError, run_loop, settle
from octavo.common import logging
from octavo.common.background import call_in_thread
from octavo.common.child_end import why_it_ended
from octavo.common.placement import Placement, bind
from octavo.common.resources import oom_kills
from octavo.common.stopping import (
    StoppedWhileStartingError,
    end_tree,
    exit_at_once,
    exit_on_signals,
)
from octavo.engine.settings import EngineSettings

log = structlog.get_logger(__name__)

PR_SET_PDEATHSIG = 1
STOP_SECONDS = 5.0
"""Seconds after the drain timeout before the engine is killed."""
OUT_OF_MEMORY = (
    "lower --cache-memory and --swap-space, use a smaller model, or give the container more memory"
)

Report = tuple[Literal["ready", "failed"], str]


class EngineProcess:
    """Start an engine in a new process; stop it on exit.

    Args:
        settings: of the engine.
        socket: path of the Unix socket to listen on.
        name: in errors, such as "the engine".
        placement: the part of the machine to use; default: all that this process may use.
    """

    def __init__(
        self,
        settings: EngineSettings,
        socket: Path,
        name: str = "the engine",
        placement: Placement | None = None,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._settings = settings
        self._name = name
        self.socket = socket
        self._reports, self._child_end = spawn.Pipe(duplex=False)
        self._oom_kills = oom_kills()
        self._ready = False
        self._process = spawn.Process(
            target=_run,
            args=(settings, socket, placement, self._child_end, os.getpid()),
            name="octavo-engine",
        )

    async def ready(self) -> str:
        """Wait until the engine accepts requests; return its address.

        Raises:
            StartError: it failed to start.
        """
        try:
            kind, text = await call_in_thread(self._reports.recv)
        except EOFError:
            await self.ended()
            raise StartError(f"{self._name} died while starting ({self._end()})") from None
        if kind == "failed":
            raise StartError(f"{self._name} cannot start: {text}")
        self._ready = True
        return str(text)

    async def ended(self) -> None:
        """Wait until the process has ended."""
        await call_in_thread(self._process.join)

    def check(self) -> None:
        """Check that the process is alive.

        Raises:
            StartError: it ended; the message has the exit code or signal.
        """
        if self._process.is_alive():
            return
        why = self._end()
        with contextlib.suppress(EOFError):
            if self._reports.poll():
                why = f"{why}: {self._reports.recv()[1]}"
        raise StartError(f"{self._name} ended by itself ({why})")

    def begin_to_stop(self) -> None:
        """Send SIGTERM.

        An engine that is not ready has nothing to drain: it is killed at once, as a thread that
        loads a model or a compiler would let it wait.
        """
        if not self._ready and self._process.pid is not None:
            end_tree(self._process.pid)
        elif self._process.is_alive():
            self._process.terminate()

    def stop(self) -> None:
        """Send SIGTERM if `begin_to_stop` has not, wait for the drain timeout, then kill."""
        self.begin_to_stop()
        self._process.join(self._settings.drain_timeout + STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _end(self) -> str:
        """Return the signal or exit code that ended the process, and what to do."""
        return why_it_ended(self._process.exitcode or 0, self._oom_kills, OUT_OF_MEMORY)

    def __enter__(self) -> Self:
        with _interrupts_blocked():
            self._process.start()
        self._child_end.close()  # the pipe then closes when the child dies
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in a block, and in the processes that it starts.

    Ctrl-C reaches a child too, which would show a traceback while it imports.
    """
    resource_tracker.ensure_running()  # starting it later would unblock SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _run(
    settings: EngineSettings,
    socket: Path,
    placement: Placement | None,
    reports: Connection,
    parent: int,
) -> None:
    """Serve until SIGTERM in the child; report readiness or failure to the parent."""
    _die_with(parent)
    os.setpgid(0, 0)  # the parent handles ctrl-C: it drains the router first
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one that came before
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    logging.configure(settings.log_format, settings.log_level)
    if placement is not None:  # now, while there are no other threads, and PyTorch is not imported
        bind(placement)

    def report(kind: Literal["ready", "failed"], text: str) -> None:
        reports.send((kind, text))

    def ready(address: str) -> None:
        settle()
        report("ready", address)

    try:
        with exit_on_signals():
            run_loop(run_engine(settings, ready, socket))
    except EXPECTED as error:
        log.debug("traceback of the next error", exc_info=True)
        report("failed", str(error))
        sys.exit(1)
    except StoppedWhileStartingError as error:
        exit_at_once(error.code)
    except Exception as error:
        log.exception("engine failed")
        report("failed", f"{error}" or type(error).__name__)
        sys.exit(1)


def _die_with(parent: int) -> None:
    """Make the kernel kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os.kill(os.getpid(), signal.SIGKILL)
