"""The processes of a session: one process and its descendants, even if it died before them."""

import contextlib
import os

import psutil


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
