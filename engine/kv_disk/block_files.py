"""Blocks of the KV cache as files, one each, in a directory that engines may share.

A file's name is its block's key in the prefix cache, so its contents never change, and engines that
write the same block write the same file. A file appears under its name once it is whole, and its
checksum is compared when it is read: a torn or damaged file is deleted, never used. Only the owner
may read the files, since they hold what users wrote.
"""

import fcntl
import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from octavo.engine.kv_disk.reads import Bytes

_HEADER = struct.Struct("<8sQL")
_MAGIC = b"octavoKV"
_SUFFIX, _INCOMPLETE = ".kv", ".kv-part"
_LOCK = "lock"
_TRIMMED_TO = 0.9
"""Share of the limit that is left after the least recently used files are deleted."""
_WRITTEN_SHARE = 0.01
"""Share of the limit that an engine may write before it counts all files again.

So ten engines can share a directory."""
_ABANDONED_SECONDS = 60.0
"""Age at which an incomplete file counts as abandoned."""


class BlockFiles:
    """The files of one model's blocks, within a directory's limit for all models.

    Attributes:
        block_bytes: Bytes per block.
        held: Keys of the blocks that have a file, as of the last `refresh` or `write`.
        changed: Keys added to `held` or removed from it, since somebody took them.
    """

    def __init__(self, root: Path, model: str, block_bytes: int, max_bytes: int) -> None:
        """Make the directory, or use an existing one.

        Args:
            root: The directory that engines share.
            model: Name of what the contents depend on besides tokens; see `fingerprint.py`.
            block_bytes: Bytes per block.
            max_bytes: Maximum bytes of all files in `root`.

        Raises:
            OSError: The directory cannot be made or written to.
        """
        self.block_bytes = block_bytes
        self._root, self._directory = root, root / model
        self._max_bytes = max_bytes
        self._listed: dict[Path, float] = {}  # each folder's modification time when listed
        self._unlisted_bytes = max_bytes  # written since all files were counted; count them first
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        self.held: set[bytes] = set()
        self.changed: deque[bytes] = deque()
        self.refresh()
        self._trim()

    def refresh(self) -> None:
        """Update `held` with the files that other engines wrote or deleted."""
        for folder in list(self._directory.iterdir()):
            changed = folder.stat().st_mtime_ns
            if self._listed.get(folder) == changed or not folder.is_dir():
                continue
            prefix = bytes.fromhex(folder.name)
            present = {bytes.fromhex(path.stem) for path in folder.glob(f"*{_SUFFIX}")}
            gone = {key for key in self.held.copy() if key[:1] == prefix} - present
            new = present - self.held
            self.held = (self.held - gone) | new
            self.changed.extend(gone | new)
            self._listed[folder] = changed

    def read(self, key: bytes, contents: Bytes) -> bool:
        """Read a block.

        Args:
            key: The block's key.
            contents: `[block_bytes]`, set to the block's contents.

        Returns:
            Whether the block exists; if not, `contents` is undefined.
        """
        path = self._path(key)
        try:
            with path.open("rb") as file:
                header = file.read(_HEADER.size)
                size = file.readinto(contents.data)
                whole = header == _header(contents) and size == len(contents) and not file.read(1)
            if whole:
                os.utime(path)  # the least recently used are deleted first
                return True
            path.unlink(missing_ok=True)
        except OSError:
            pass
        self._discard(key)
        return False

    def write(self, key: bytes, contents: Bytes) -> None:
        """Write a block, and delete the least recently used ones beyond the limit.

        Raises:
            OSError: The disk is full, or the directory cannot be written to.
        """
        path = self._path(key)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # Only its owner may read a file that this makes.
        with NamedTemporaryFile(dir=path.parent, suffix=_INCOMPLETE, delete=False) as file:
            try:
                file.write(_header(contents))
                file.write(contents.data)
                file.flush()
                Path(file.name).rename(path)
            except OSError:
                with suppress(OSError):
                    Path(file.name).unlink(missing_ok=True)
                raise
        self.held.add(key)
        self.changed.append(key)
        self._unlisted_bytes += self.block_bytes
        if self._unlisted_bytes >= _WRITTEN_SHARE * self._max_bytes:
            self._trim()

    def _path(self, key: bytes) -> Path:
        return self._directory / key[:1].hex() / f"{key.hex()}{_SUFFIX}"

    def _trim(self) -> None:
        """Delete abandoned files and, beyond the limit, the least recently used."""
        with (self._root / _LOCK).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return  # another engine does it
            self._unlisted_bytes = 0
            files = sorted(self._files())
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total <= _TRIMMED_TO * self._max_bytes:
                    break
                path.unlink(missing_ok=True)
                total -= size
                if path.is_relative_to(self._directory):
                    self._discard(bytes.fromhex(path.stem))

    def _discard(self, key: bytes) -> None:
        self.held.discard(key)
        self.changed.append(key)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield the time of last use, size and path of each block of any model.

        Delete abandoned files. The directory may hold files of others, which must stay.
        """
        for path in self._root.glob(f"*/[0-9a-f][0-9a-f]/*{_SUFFIX}*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix == _SUFFIX:
                    yield status.st_mtime, status.st_size, path
                elif (
                    path.suffix == _INCOMPLETE
                    and time.time() - status.st_mtime > _ABANDONED_SECONDS
                ):
                    path.unlink()


def _header(contents: Bytes) -> bytes:
    return _HEADER.pack(_MAGIC, len(contents), zlib.crc32(contents.data))
