"""Reads and writes block files beside the core's thread, which never waits for a disk.

Blocks are written behind: the core copies a computed block to memory, and a thread writes it. If
the disk is slower than the model, blocks are dropped; the queue stays bounded.

Blocks are read ahead: a request whose prefix has files waits for them outside the scheduler, as
long as reading is not behind computing by more than `MAX_DELAY`. Then they are in swap space, where
admission finds them, and the rest is computed.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np
import structlog

from octavo.common.background import keep_thread_running
from octavo.engine.kv_disk.block_files import BlockFiles, Bytes

log = structlog.get_logger(__name__)

MAX_PENDING_BYTES = 256 << 20
"""Maximum bytes of copied blocks that wait to be written."""
READERS = 2
"""Maximum number of concurrent reads, one per request."""
REFRESH_SECONDS = 5.0
"""Maximum age of the list of other engines' files."""
RETRY_SECONDS = 30.0
"""Time without writes after an error, such as a full disk, and without reads from a slow disk."""
MAX_DELAY = 0.1
"""Maximum delay of a first token by a slow disk, as a share of computing the prefix."""
MIN_DELAY_SECONDS = 0.05
"""Delay that is always allowed, since threads need it to start."""
ASSUMED_READ_SHARE = 0.5
"""Time to read blocks, as a share of the time to compute them, until it is measured."""
_SMOOTHING = 0.2


class StoredBlock(NamedTuple):
    """A block that was read, `[block_bytes]`."""

    key: bytes
    contents: Bytes


class Read:
    """A read of some blocks for one request.

    It ends once: when all are read, when one is missing, or when computing is faster.

    Attributes:
        keys: Keys of the blocks.
        prefill_seconds: Time that computing them takes.
        begun: Monotonic time of its first block's read; None while no thread is free.
        ended: Whether it has ended.
        left: Whether its thread is done with it, maybe later than `ended`.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        prefill_seconds: float,
        on_end: Callable[[list[StoredBlock]], None],
    ) -> None:
        self.keys = keys
        self.prefill_seconds = prefill_seconds
        self._on_end = on_end
        self._blocks: list[StoredBlock] = []
        self._lock = threading.Lock()
        self._queued = time.monotonic()
        self.begun: float | None = None
        self.ended = False
        self.left = False

    @property
    def due(self) -> float:
        """Monotonic time at which it ends, unless it makes progress."""
        if self.begun is None:
            return self._queued + self.prefill_seconds
        saved = self.prefill_seconds * len(self._blocks) / len(self.keys)
        return self.begun + saved + max(MAX_DELAY * self.prefill_seconds, MIN_DELAY_SECONDS)

    def add(self, block: StoredBlock) -> None:
        """Add a block, unless the read has ended."""
        with self._lock:
            if not self.ended:
                self._blocks.append(block)

    def end(self, *, cancelled: bool = False) -> bool:
        """End it and pass on its blocks; return False if it had ended before."""
        with self._lock:
            if self.ended:
                return False
            self.ended = True
        if not cancelled:
            self._on_end(self._blocks)
        return True


class DiskTier:
    """The threads that read and write one model's block files.

    Attributes:
        counters: Numbers since the start of blocks `written` and `read`, blocks `dropped` because
            the disk is too slow, full or gone, and reads that were `late`: computing was faster.
        published: Keys of the blocks that have a file, as of the last `take_changes`.
    """

    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        self.counters = Counter(written=0, read=0, dropped=0, late=0)
        self._pending: deque[tuple[bytes, Callable[[], Bytes]]] = deque()
        self._saved = threading.Condition()
        self._begun = threading.Condition()
        self._closed = False
        self._bytes_per_second: float | None = None
        self._observed = 0.0  # monotonic time
        self._reads: SimpleQueue[Read | None] = SimpleQueue()
        self._hanging: set[Read] = set()  # ended, but their readers still wait for the disk
        self._unended: list[Read] = []
        self.published: set[bytes] = set()
        # An engine must be able to end while a disk hangs: so all threads are daemons.
        for work in (self._write_blocks, self._end_late_reads, *(READERS * [self._read_blocks])):
            keep_thread_running(work, "kv-disk")

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
                self.counters["dropped"] += 1
                return
            self._pending.append((key, copy()))
            self._saved.notify()

    def worthwhile(self, num_blocks: int, prefill_seconds: float) -> bool:
        """Return whether reading blocks is faster than computing, or may be."""
        if len(self._hanging) >= READERS:
            return False
        if time.monotonic() - self._observed > RETRY_SECONDS:
            return True
        return self.read_share(num_blocks, prefill_seconds) < 1

    def read_share(self, num_blocks: int, prefill_seconds: float) -> float:
        """Return the time to read blocks, as a share of the time to compute them; 1 at most."""
        if self._bytes_per_second is None:
            return ASSUMED_READ_SHARE
        seconds = num_blocks * self._files.block_bytes / self._bytes_per_second
        return min(1.0, seconds / prefill_seconds)

    def read(
        self,
        keys: Sequence[bytes],
        prefill_seconds: float,
        on_end: Callable[[list[StoredBlock]], None],
    ) -> Read:
        """Read blocks, in order.

        Args:
            keys: Their keys.
            prefill_seconds: Time that computing them takes.
            on_end: Called once, from another thread, with the blocks read until then.
        """
        read = Read(keys, prefill_seconds, on_end)
        with self._begun:
            self._unended.append(read)
            self._begun.notify()
        self._reads.put(read)
        return read

    def close(self) -> None:
        """Stop the threads; blocks not written yet are dropped."""
        self._closed = True
        for condition in (self._saved, self._begun):
            with condition:
                condition.notify()
        for _ in range(READERS):
            self._reads.put(None)

    def _end_late_reads(self) -> None:
        while True:
            with self._begun:
                if self._closed:
                    return
                self._unended = [read for read in self._unended if not read.ended]
                now, hangs = time.monotonic(), len(self._hanging) >= READERS
                late = [r for r in self._unended if r.due <= now or (hangs and r.begun is None)]
                if not late:
                    first = min((read.due for read in self._unended), default=math.inf)
                    self._begun.wait(min(first - now, threading.TIMEOUT_MAX))
            for read in late:
                if read.end():
                    self.counters["late"] += 1
                    if read.begun is not None:
                        self._hanging.add(read)
                    if read.left:  # meanwhile
                        self._hanging.discard(read)

    def _read_blocks(self) -> None:
        while (read := self._reads.get()) is not None:
            with self._begun:
                if not read.ended:
                    read.begun = time.monotonic()
                self._begun.notify()
            if not read.ended:
                self._read(read)
            read.left = True
            self._hanging.discard(read)

    def _read(self, read: Read) -> None:
        began, blocks = time.perf_counter(), 0
        try:
            if not self.worthwhile(len(read.keys), read.prefill_seconds):  # any more
                return
            for key in read.keys:
                contents = np.empty(self._files.block_bytes, np.uint8)
                if read.ended or not self._files.read(key, contents):
                    break
                read.add(StoredBlock(key, contents))
                blocks += 1
        finally:
            self.counters["read"] += blocks
            if blocks:
                self._observe(blocks * self._files.block_bytes / (time.perf_counter() - began))
            read.end()

    def _observe(self, rate: float) -> None:
        old, self._observed = self._bytes_per_second, time.monotonic()
        self._bytes_per_second = rate if old is None else old + _SMOOTHING * (rate - old)

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
                    self.counters["dropped"] += 1
                    continue
                key, contents = next_
                self._files.write(key, contents())
                self.counters["written"] += 1
            except OSError as error:
                paused = now + RETRY_SECONDS
                self.counters["dropped"] += next_ is not None
                log.warning("cannot keep blocks on disk", error=str(error), retry_s=RETRY_SECONDS)
