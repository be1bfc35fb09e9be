"""Detection of changed files."""

from pathlib import Path

Signature = tuple[tuple[int, int, int] | None, ...] | None
"""A result of `signature`; None before the first one."""


def signature(*paths: Path) -> Signature:
    """Return a value that changes when a file or a link's target is written or replaced."""
    return tuple(_one(path.expanduser()) for path in paths)


class FileWatch:
    """Notices that a file was written, once it is no longer being written.

    Args:
        path: The file, which the caller reads after this.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = self._found = signature(path)

    def changed(self) -> bool:
        """Return whether to read the file again: it changed, but not since the last call."""
        before, self._found = self._found, signature(self._path)
        if self._found == self._read or self._found != before:
            return False  # unchanged, or perhaps still being written
        self._read = self._found
        return True


def _one(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
