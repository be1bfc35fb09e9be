"""The file descriptors of a process: their limit, and some in reserve."""

import errno
import os
import resource
from contextlib import suppress

import structlog

log = structlog.get_logger(__name__)

OWN = 128
"""Descriptors that a server needs besides its clients' connections: files, engines, epolls."""


def raise_limit() -> None:
    """Let this process, and its children, open as many files as the hard limit says."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports an infinite limit, but refuses to set it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_limit(connections: int) -> None:
    """Warn if there are not enough descriptors for so many connections of clients."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < connections + OWN:
        log.warning(
            "fewer file descriptors than connections may need",
            limit=limit,
            needed=connections + OWN,
            hint="raise the hard limit of open files (ulimit -Hn, LimitNOFILE), or lower "
            "--max-connections",
        )


def none_left(error: OSError) -> bool:
    """Return whether an error says that no descriptor is left."""
    return error.errno in {errno.EMFILE, errno.ENFILE}


class Reserve:
    """Descriptors that are held, to be given back when no other is left.

    Args:
        size: Number of descriptors.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []

    def fill(self) -> None:
        """Hold as many as there can be again."""
        with suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def release(self) -> bool:
        """Give one back; return whether there was one."""
        if self._held:
            os.close(self._held.pop())
            return True
        return False

    def close(self) -> None:
        """Give all back."""
        while self.release():
            pass
