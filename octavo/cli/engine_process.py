"""The engine of `octavo serve`: a child process that cannot outlive its parent."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import structlog

from octavo.cli.engine import run_engine
from octavo.cli.running import EXPECTED, StartError, run_loop, settle
from octavo.common import logging
from octavo.common.background import call_in_thread
from octavo.common.stopping import StoppedWhileStartingError, exit_at_once, exit_on_sigterm
from octavo.engine.settings import EngineSettings

log = structlog.get_logger(__name__)

PR_SET_PDEATHSIG = 1
STOP_SECONDS = 5.0
"""Beyond its own drain time, what the engine gets to stop before it is killed."""

Report = tuple[Literal["ready", "failed"], str]


class EngineProcess:
    """Starts an engine in a fresh process and stops it on exit.

    Args:
        settings: the engine's.
        socket: where it listens.
    """

    def __init__(self, settings: EngineSettings, socket: Path) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._settings = settings
        self._reports, self._child_end = spawn.Pipe(duplex=False)
        self._process = spawn.Process(
            target=_run, args=(settings, socket, self._child_end, os.getpid()), name="octavo-engine"
        )

    async def ready(self) -> str:
        """Waits until the engine accepts requests and returns its address.

        Raises:
            StartError: it failed to start; the message says why.
        """
        try:
            kind, text = await call_in_thread(self._reports.recv)
        except EOFError:
            await self.ended()
            raise StartError(f"the engine died while starting ({self._end()})") from None
        if kind == "failed":
            raise StartError(f"the engine cannot start: {text}")
        return str(text)

    async def ended(self) -> None:
        """Waits until the process is gone."""
        await call_in_thread(self._process.join)

    def check(self) -> None:
        """Does nothing while the process lives.

        Raises:
            StartError: it does not; the message says how it ended.
        """
        if self._process.is_alive():
            return
        why = self._end()
        with contextlib.suppress(EOFError):
            if self._reports.poll():
                why = f"{why}: {self._reports.recv()[1]}"
        raise StartError(f"the engine ended by itself ({why})")

    def stop(self) -> None:
        """Asks the engine to stop, waits for as long as it may drain, then kills it."""
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(self._settings.drain_timeout + STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _end(self) -> str:
        """How the process ended, for a person."""
        code = self._process.exitcode or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def __enter__(self) -> Self:
        self._process.start()
        self._child_end.close()  # so that the child's death is the pipe's end
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _run(settings: EngineSettings, socket: Path, reports: Connection, parent: int) -> None:
    """The child: serves until SIGTERM, and tells the parent how the start went."""
    _die_with(parent)
    os.setpgid(0, 0)  # ctrl-C is the parent's to handle: it drains the router first
    logging.configure(settings.log_format, settings.log_level)

    def report(kind: Literal["ready", "failed"], text: str) -> None:
        reports.send((kind, text))

    def ready(address: str) -> None:
        settle()
        report("ready", address)

    try:
        with exit_on_sigterm():
            run_loop(run_engine(settings, ready, socket))
    except EXPECTED as error:
        log.debug("the traceback of what follows", exc_info=True)
        report("failed", str(error))
        sys.exit(1)
    except StoppedWhileStartingError:
        exit_at_once(0)
    except Exception as error:
        log.exception("the engine failed")
        report("failed", f"{error}" or type(error).__name__)
        sys.exit(1)


def _die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies, however that happens."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os.kill(os.getpid(), signal.SIGKILL)
