"""The Unix socket of the HTTP server, for proxies on the same machine."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

MODE = 0o660
"""Mode of the socket's file: the router's user and group may connect."""


def listen(path: Path, backlog: int) -> socket.socket:
    """Return a socket that listens at a path; one that nobody listens at is replaced.

    Args:
        path: The socket's file.
        backlog: Connections that may wait to be accepted.

    Raises:
        OSError: Another server listens there, something else is there, or it cannot be made.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(0o777 & ~MODE)  # nobody else may connect before its mode is set
        try:
            listening.bind(str(path))
        finally:
            os.umask(mask)
        listening.listen(backlog)
    except OSError as error:
        listening.close()
        why = (error.strerror or str(error)).lower()
        raise OSError(f"cannot serve HTTP on {path} ({why}): give another --http-uds") from None
    return listening


def remove(path: Path, number: int) -> None:
    """Remove a socket's file, unless it is another one by now.

    Args:
        path: The file.
        number: The number that it had, its inode's.
    """
    with suppress(OSError):
        if path.stat().st_ino == number:
            path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove the socket of a server that is gone.

    Raises:
        OSError: Something else is there, or a server listens at it.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError("something else is there")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # one whose backlog is full is in use
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
            except BlockingIOError:
                pass
        raise OSError("another server listens there")
