"""Find Git LFS pointers: what a clone without Git LFS has in place of large files."""

from pathlib import Path

from octavo.common.models.errors import ModelError

POINTER = b"version https://git-lfs.github.com/spec/"
"""How a pointer begins."""


def check_no_pointer(file: Path) -> None:
    """Refuse a Git LFS pointer.

    Raises:
        ModelError: The file is one; the message says what to do.
        OSError: The file cannot be read.
    """
    with file.open("rb") as opened:
        beginning = opened.read(len(POINTER))
    if beginning == POINTER:
        raise ModelError(
            f"{file} is a Git LFS pointer, not the file itself: run `git lfs pull` in its directory"
        )
