"""Checks a cached file before it is loaded: its contents, its owner and its mode.

Loading a shared library runs its code, and a truncated one ends the process with SIGBUS.
"""

import hashlib
import os
import stat
from pathlib import Path

SEAL = b"octavo-sha256:"
"""Prefix of the digest at the end of a sealed file."""
SEAL_BYTES = len(SEAL) + hashlib.sha256().digest_size


class DamagedFileError(OSError):
    """A file has changed since it was written; the message names the file."""


class UntrustedFileError(OSError):
    """Another user may have written a file; the message names the file and a remedy."""


def seal(path: Path) -> None:
    """Append a file's SHA-256 to the file, which loaders of libraries ignore."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(SEAL + digest)


def verify_seal(path: Path) -> None:
    """Check that a file has not changed since `seal`.

    Raises:
        DamagedFileError: The file has changed.
        OSError: The file cannot be read.
    """
    contents = path.read_bytes()
    whole, ending = contents[:-SEAL_BYTES], contents[-SEAL_BYTES:]
    if ending != SEAL + hashlib.sha256(whole).digest():
        raise DamagedFileError(f"{path} is damaged: it does not end with its own SHA-256")


def check_trusted(*paths: Path) -> None:
    """Check that no other user can have written files or directories.

    Root or this process's user must own them. Other users must not be able to write to them; their
    group may if this process belongs to it, as in volumes of containers.

    Raises:
        UntrustedFileError: Another user may have written one.
        OSError: A path does not exist.
    """
    for path in paths:
        status = path.stat()
        if status.st_uid not in {0, os.geteuid()}:
            raise UntrustedFileError(
                f"{path} belongs to another user ({status.st_uid}): remove it, or set"
                " OCTAVO_CACHE_DIR to a directory of your own"
            )
        foreign_group = status.st_gid not in {os.getegid(), *os.getgroups()}
        if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and foreign_group):
            raise UntrustedFileError(
                f"other users can write to {path}: run chmod go-w on it, or set OCTAVO_CACHE_DIR"
                " to a directory of your own"
            )
