"""Noticing that files have changed."""

from pathlib import Path

Signature = tuple[tuple[int, int, int] | None, ...] | None
"""What `signature` returns; None before the first look."""


def signature(*paths: Path) -> Signature:
    """Returns what changes whenever a file is written or replaced, behind links too.

    A file that is not there has one as well: None.
    """
    return tuple(_one(path.expanduser()) for path in paths)


def _one(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
