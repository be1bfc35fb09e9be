"""The HTTP server's Unix socket, for proxies on the same machine."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

MODE = 0o660
"""Mode of the socket file: the router's user and group may connect."""


def listen(path: Path, backlog: int) -> socket.socket:
    """Return a socket that listens at a path, replacing the socket of a dead server.

    Args:
        path: Path of the socket file.
        backlog: Maximum connections waiting to be accepted.

    Raises:
        OSError: Another server listens at the path, another kind of file is there, or it cannot be
            made.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        mask = os.umask(0o777 & ~MODE)  # nobody else may connect before chmod
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
    """Remove a socket file, unless another server has replaced it.

    Args:
        path: Path of the socket file.
        number: The file's inode number when it was made.
    """
    with suppress(OSError):
        if path.stat().st_ino == number:
            path.unlink()


def _remove_stale(path: Path) -> None:
    """Remove the socket file of a dead server.

    Raises:
        OSError: The file is no socket, or a server listens at it.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise FileExistsError("something else is there")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # a full backlog means that it is in use
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
                return
            except BlockingIOError:
                pass
        raise OSError("another server listens there")
