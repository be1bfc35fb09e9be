"""Detects Git LFS pointers: the stand-ins for large files in a clone without Git LFS."""

from pathlib import Path

from octavo.common.models.errors import ModelError

POINTER = b"version https://git-lfs.github.com/spec/"
"""Beginning of a pointer."""


def check_no_pointer(file: Path) -> None:
    """Reject a Git LFS pointer.

    Raises:
        ModelError: The file is a pointer; the message says what to do.
        OSError: The file cannot be read.
    """
    with file.open("rb") as opened:
        beginning = opened.read(len(POINTER))
    if beginning == POINTER:
        raise ModelError(
            f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its directory"
        )
