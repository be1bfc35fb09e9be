"""Writes block files beside the core's thread, which never waits for a disk, and reads them.

Blocks are written behind: the core copies a computed block to memory, and a thread writes it. If
the disk is slower than the model, blocks are dropped; the queue stays bounded.

Blocks are read ahead: a request whose prefix has files waits for them outside the scheduler, as
long as reading is not behind computing by more than `MAX_DELAY`. Then they are in swap space, where
admission finds them, and the rest is computed.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator

import numpy as np
import structlog

from octavo.common.background import keep_thread_running
from octavo.engine.kv_disk.block_files import BlockFiles
from octavo.engine.kv_disk.reads import Bytes, Rate, Read, Reads

log = structlog.get_logger(__name__)

MAX_PENDING_BYTES = 256 << 20
"""Maximum bytes of copied blocks that wait to be written."""
READERS = 2
"""Maximum number of concurrent reads, one per request."""
REFRESH_SECONDS = 5.0
"""Maximum age of the list of other engines' files."""
RETRY_SECONDS = 30.0
"""Time without writes after an error, such as a full disk."""


class DiskTier:
    """The threads that read and write one model's block files.

    Attributes:
        reads: Reads the files.
        rate: The speed of that.
        published: Keys of the blocks that have a file, as of the last `take_changes`.
    """

    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        self.reads = Reads("kv-disk", READERS)
        self.rate = Rate(files.block_bytes)
        self._counters = Counter(written=0, dropped=0)
        self._pending: deque[tuple[bytes, Callable[[], Bytes]]] = deque()
        self._saved = threading.Condition()
        self._closed = False
        self.published: set[bytes] = set()
        keep_thread_running(self._write_blocks, "kv-disk")

    @property
    def counters(self) -> Counter[str]:
        """Numbers since the start.

        These are blocks `written` and `read`, blocks `dropped` because the disk is too slow, full
        or gone, and reads that were `late`: computing was faster.
        """
        return Counter({**self._counters, **self.reads.counters})

    @property
    def held(self) -> set[bytes]:
        """Keys of the blocks that have a file."""
        return self._files.held

    def take_changes(self) -> tuple[set[bytes], set[bytes]]:
        """Update `published`.

        Returns:
            The keys added, and the keys removed, since the last call.
        """
        queued, changed = self._files.changed, set[bytes]()
        while queued:
            changed.add(queued.popleft())
        added = {key for key in changed if key in self.held} - self.published
        removed = {key for key in changed if key not in self.held} & self.published
        self.published ^= added | removed
        return added, removed

    def save(self, key: bytes, copy: Callable[[], Callable[[], Bytes]]) -> None:
        """Queue a block to be written, or drop it.

        Args:
            key: The block's key.
            copy: Copies it, now; the function that it returns waits for the copy, `[block_bytes]`.
        """
        if key in self.held:
            return
        with self._saved:
            if len(self._pending) * self._files.block_bytes >= MAX_PENDING_BYTES:
                self._counters["dropped"] += 1
                return
            self._pending.append((key, copy()))
            self._saved.notify()

    def contents(self, read: Read) -> Generator[Bytes, None, None]:
        """Yield the contents of blocks; see `Source`."""
        for key in read.keys:
            contents = np.empty(self._files.block_bytes, np.uint8)
            if not self._files.read(key, contents):
                return
            yield contents

    def close(self) -> None:
        """Stop the threads; blocks not written yet are dropped."""
        self._closed = True
        with self._saved:
            self._saved.notify()
        self.reads.close()

    def _write_blocks(self) -> None:
        paused = refreshed = 0.0
        while True:
            with self._saved:
                self._saved.wait_for(lambda: self._pending or self._closed, REFRESH_SECONDS)
                if self._closed:
                    return
                next_ = self._pending.popleft() if self._pending else None
            now = time.monotonic()
            try:
                if now - refreshed > REFRESH_SECONDS:
                    refreshed = now
                    self._files.refresh()
                if next_ is None:
                    continue
                if now < paused:
                    self._counters["dropped"] += 1
                    continue
                key, contents = next_
                self._files.write(key, contents())
                self._counters["written"] += 1
            except OSError as error:
                paused = now + RETRY_SECONDS
                self._counters["dropped"] += next_ is not None
                log.warning("cannot keep blocks on disk", error=str(error), retry_s=RETRY_SECONDS)
