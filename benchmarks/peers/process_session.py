"""The processes of a session: one process and its descendants, even if it died before them."""

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Self

import psutil

LOGGED_CHARACTERS = 300
END_SECONDS = 60.0
"""How long a process may take to end by itself."""


def members(leader: int) -> list[psutil.Process]:
    """Return the processes of the session that the process `leader` began."""
    family = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader:
                family.append(process)
    return family


def suspend(leader: int) -> None:
    """Stop them, so that they cost only memory."""
    for process in members(leader):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()


def resume(leader: int) -> None:
    """Continue them."""
    for process in reversed(members(leader)):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def kill(leader: int) -> None:
    """End them by SIGKILL."""
    for process in members(leader):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class SessionProcess:
    """A process that leads a session; it and its descendants end with the `with` block.

    Args:
        process: started with `start_new_session=True`.
        log: file that gets what it prints.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log

    def pause(self) -> None:
        """Suspend it and its descendants, so that they cost only memory."""
        suspend(self._process.pid)

    def resume(self) -> None:
        """Continue them."""
        resume(self._process.pid)

    def close(self) -> None:
        """Ask it to end; after `END_SECONDS` end it by SIGKILL, and its descendants."""
        self.resume()
        self._ask_to_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask_to_end(self) -> None:
        self._process.terminate()

    def _kill(self) -> None:
        kill(self._process.pid)

    def _last_words(self) -> str:
        """Return the end of its log, as one line."""
        return " ".join(self._log.read_text(errors="replace").split())[-LOGGED_CHARACTERS:]
