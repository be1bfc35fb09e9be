"""Reads and writes block files beside the core's thread, which never waits for a disk.

Blocks are written behind: the core copies a computed block to memory, and a thread writes it. If
the disk is slower than the model, blocks are dropped; the queue stays bounded.

Blocks are read ahead: a request whose prefix has files waits for them outside the scheduler, for at
most the time that computing the prefix takes. Then they are in swap space, where admission finds
them.
"""

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import count
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
"""Time without writes after an error, such as a full disk."""
DEFAULT_SECONDS = 10.0
"""Maximum time of a read before the rate of prefill is known."""
_SMOOTHING = 0.2


class StoredBlock(NamedTuple):
    """A block that was read, `[block_bytes]`."""

    key: bytes
    contents: Bytes


class Read:
    """A read of some blocks for one request.

    It ends once: when all are read, when one is missing, or when its time is over.

    Attributes:
        keys: Keys of the blocks.
        ended: Whether it has ended.
        left: Whether its thread is done with it, maybe later than `ended`.
    """

    def __init__(self, keys: Sequence[bytes], on_end: Callable[[list[StoredBlock]], None]) -> None:
        self.keys = keys
        self._on_end = on_end
        self._blocks: list[StoredBlock] = []
        self._lock = threading.Lock()
        self.ended = False
        self.left = False

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
    """

    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        self.counters = Counter(written=0, read=0, dropped=0, late=0)
        self._pending: deque[tuple[bytes, Callable[[], Bytes]]] = deque()
        self._saved = threading.Condition()
        self._begun = threading.Condition()
        self._closed = False
        self._bytes_per_second: float | None = None
        self._reads: SimpleQueue[Read | None] = SimpleQueue()
        self._hanging: set[Read] = set()  # ended, but their readers still wait for the disk
        self._deadlines: list[tuple[float, int, Read]] = []  # a heap
        self._numbers = count()
        # An engine must be able to end while a disk hangs: so all threads are daemons.
        for work in (self._write_blocks, self._end_late_reads, *(READERS * [self._read_blocks])):
            keep_thread_running(work, "kv-disk")

    @property
    def held(self) -> set[bytes]:
        """Keys of the blocks that have a file."""
        return self._files.held

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

    def worthwhile(self, num_blocks: int, prefill_seconds: float | None) -> bool:
        """Return whether reading blocks is faster than computing, or may be."""
        if len(self._hanging) >= READERS:
            return False
        if prefill_seconds is None or self._bytes_per_second is None:
            return True
        return num_blocks * self._files.block_bytes / self._bytes_per_second < prefill_seconds

    def read(
        self,
        keys: Sequence[bytes],
        prefill_seconds: float | None,
        on_end: Callable[[list[StoredBlock]], None],
    ) -> Read:
        """Read blocks, in order.

        Args:
            keys: Their keys.
            prefill_seconds: Time that computing them takes; None if it is not known.
            on_end: Called once, from another thread, with the blocks read until then.
        """
        read = Read(keys, on_end)
        deadline = time.monotonic() + (prefill_seconds or DEFAULT_SECONDS)
        with self._begun:
            heappush(self._deadlines, (deadline, next(self._numbers), read))
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
                first = self._deadlines[0][0] if self._deadlines else math.inf
                if (left := first - time.monotonic()) > 0:
                    self._begun.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                *_, read = heappop(self._deadlines)
            if read.end():
                self.counters["late"] += 1
                self._hanging.add(read)
                if read.left:  # meanwhile
                    self._hanging.discard(read)

    def _read_blocks(self) -> None:
        while (read := self._reads.get()) is not None:
            if not read.ended:
                self._read(read)
            read.left = True
            self._hanging.discard(read)

    def _read(self, read: Read) -> None:
        began, blocks = time.perf_counter(), 0
        try:
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
        old = self._bytes_per_second
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
