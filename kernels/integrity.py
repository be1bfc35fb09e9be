"""Checks of a cached file before it is loaded: its contents, its owner and its mode.

A shared library runs as soon as it is loaded, and one that is cut short ends the process with
SIGBUS. So both are checked before.
"""

import hashlib
import os
import stat
from pathlib import Path
from typing import NamedTuple

SEAL = b"octavo-sha256:"
"""Comes before the digest at the end of a sealed file."""
SEAL_BYTES = len(SEAL) + hashlib.sha256().digest_size


class DamagedFileError(OSError):
    """A file is not what was written; the message names it."""


class UntrustedFileError(OSError):
    """Another user may have written a file; the message names it and says what to do."""


class Fingerprint(NamedTuple):
    """What a file's contents are recognised by.

    Attributes:
        size: In bytes.
        sha256: In hexadecimal digits.
    """

    size: int
    sha256: str


def fingerprint(path: Path) -> Fingerprint:
    """Return a file's fingerprint; reads all of it, at over 1 GB/s on most CPUs.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return Fingerprint(file.tell(), digest)


def verify(path: Path, expected: Fingerprint) -> None:
    """Check that a file is what was written.

    Raises:
        DamagedFileError: It is missing, or of another size or other contents.
        OSError: It cannot be read.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise DamagedFileError(f"{path} is missing") from error
    if size != expected.size:
        raise DamagedFileError(f"{path} has {size} bytes in place of {expected.size}")
    if fingerprint(path) != expected:
        raise DamagedFileError(f"{path} has changed since it was written (SHA-256)")


def seal(path: Path) -> None:
    """Append a file's SHA-256 to the file itself: loaders of libraries ignore what follows."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    with path.open("ab") as file:
        file.write(SEAL + digest)


def verify_seal(path: Path) -> None:
    """Check that a file is what `seal` left.

    Raises:
        DamagedFileError: It is not.
        OSError: It cannot be read.
    """
    contents = path.read_bytes()
    whole, ending = contents[:-SEAL_BYTES], contents[-SEAL_BYTES:]
    if ending != SEAL + hashlib.sha256(whole).digest():
        raise DamagedFileError(f"{path} is damaged: it does not end with its own SHA-256")


def check_trusted(*paths: Path) -> None:
    """Check that nobody else can have written files or directories.

    Only root and this process's user may own them. Others must not be able to write to them;
    their group may if this process belongs to it, as volumes of containers are set up.

    Raises:
        UntrustedFileError: Somebody else can.
        OSError: They do not exist.
    """
    for path in paths:
        found = path.stat()
        if found.st_uid not in {0, os.geteuid()}:
            raise UntrustedFileError(
                f"{path} belongs to another user ({found.st_uid}): remove it, or set"
                " OCTAVO_CACHE_DIR to a directory of your own"
            )
        strange_group = found.st_gid not in {os.getegid(), *os.getgroups()}
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and strange_group):
            raise UntrustedFileError(
                f"other users can write to {path}: run chmod go-w on it, or set OCTAVO_CACHE_DIR"
                " to a directory of your own"
            )
