"""File descriptors of this process: the limit, and a reserve."""

import errno
import os
import resource
from contextlib import suppress

import structlog

log = structlog.get_logger(__name__)

OWN = 128
"""Descriptors that a server needs besides client connections: files, engines, epolls."""


def raise_limit() -> None:
    """Raise this process's limit of open files to the hard limit, for children too."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS reports an infinite limit, but refuses to set it
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def check_limit(connections: int) -> None:
    """Warn if the limit is too low for this number of client connections."""
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
    """Return whether an error means that no descriptor is left."""
    return error.errno in {errno.EMFILE, errno.ENFILE}


class Reserve:
    """Reserved descriptors, to be released when no others are left.

    Args:
        size: Number of descriptors.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[int] = []

    def fill(self) -> None:
        """Open descriptors up to the size, as far as the limit allows."""
        with suppress(OSError):
            while len(self._held) < self._size:
                self._held.append(os.open(os.devnull, os.O_RDONLY))

    def release(self) -> bool:
        """Close one of the descriptors; return whether one was left."""
        if self._held:
            os.close(self._held.pop())
            return True
        return False

    def close(self) -> None:
        """Close all."""
        while self.release():
            pass
