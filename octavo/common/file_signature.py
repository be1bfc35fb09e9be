"""Detection of changed files."""

from pathlib import Path

Signature = tuple[tuple[int, int, int] | None, ...] | None
"""A result of `signature`; None before the first one."""


def signature(*paths: Path) -> Signature:
    """Return a value that changes when a file or a link's target is written or replaced."""
    return tuple(_one(path.expanduser()) for path in paths)


def _one(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
