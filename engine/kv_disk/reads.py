"""Reads blocks of a slower tier, or of another engine, beside the core's thread.

A read ends when it falls behind computing by more than `MAX_DELAY`, so a source that is slow, hangs
or vanishes delays a request by no more than that.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from queue import SimpleQueue
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.common.background import keep_thread_running

Bytes = NDArray[np.uint8]

BATCH_BYTES = 16 << 20
"""Bytes of blocks that are passed on at once."""
MAX_BATCHES = 2
"""Maximum batches of a read that wait to be placed."""
RETRY_SECONDS = 30.0
"""Time without reads from a slow source."""
MAX_DELAY = 0.1
"""Maximum delay of a first token by a slow source, as a share of computing the prefix."""
MIN_DELAY_SECONDS = 0.05
"""Delay that is always allowed, since threads need it to start."""
ASSUMED_READ_SHARE = 0.5
"""Assumed time to read blocks before it is measured, as a share of the time to compute them."""
_SMOOTHING = 0.2


class StoredBlock(NamedTuple):
    """A block that was read, `[block_bytes]`."""

    key: bytes
    contents: Bytes


class Rate:
    """The measured speed of a source.

    Attributes:
        block_bytes: Bytes per block.
    """

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._bytes_per_second: float | None = None
        self._observed = 0.0  # monotonic time

    def worthwhile(self, num_blocks: int, prefill_seconds: float) -> bool:
        """Return whether reading blocks is faster than computing, or may be."""
        if time.monotonic() - self._observed > RETRY_SECONDS:
            return True
        return self.share(num_blocks, prefill_seconds) < 1

    def share(self, num_blocks: int, prefill_seconds: float) -> float:
        """Return the time to read blocks, as a share of the time to compute them; 1 at most."""
        if self._bytes_per_second is None:
            return ASSUMED_READ_SHARE
        seconds = num_blocks * self.block_bytes / self._bytes_per_second
        return min(1.0, seconds / prefill_seconds)

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Update the speed from a read."""
        rate, old = num_blocks * self.block_bytes / seconds, self._bytes_per_second
        self._observed = time.monotonic()
        self._bytes_per_second = rate if old is None else old + _SMOOTHING * (rate - old)


OnBlocks = Callable[["Read", list[StoredBlock], bool], None]
"""Callback for the next blocks of a read; its bool is true if they are the last."""


class Read:
    """A read of some blocks for one request.

    It ends once: when all are read, when one is missing, or when computing is faster.

    Attributes:
        keys: Keys of the blocks.
        prefill_seconds: Time that computing them takes; infinite where nothing waits for them.
        follows: Whether the source is still computing the blocks.
        begun: Monotonic time of its first block's read; None while no thread is free.
        ended: Whether it has ended.
        late: Whether it ended because computing was faster.
        left: Whether its thread is done with it, maybe later than `ended`.
        stop: Called at its end, for a thread that waits for the source.
    """

    def __init__(self, keys: Sequence[bytes], prefill_seconds: float, on_blocks: OnBlocks) -> None:
        self.keys = keys
        self.prefill_seconds = prefill_seconds
        self.follows = prefill_seconds == math.inf
        self._on_blocks = on_blocks
        self._blocks: list[StoredBlock] = []
        self._num_read = self._num_before = 0
        self._room = threading.Semaphore(MAX_BATCHES)
        self._lock = threading.Lock()
        self._queued = time.monotonic()
        self.begun: float | None = None
        self.ended = False
        self.late = False
        self.left = False
        self.stop: Callable[[], object] = lambda: None

    @property
    def due(self) -> float:
        """Monotonic time at which it ends, unless it makes progress."""
        if self.begun is None:
            return self._queued + self.prefill_seconds
        done, all_ = self._num_read - self._num_before, len(self.keys) - self._num_before
        saved = self.prefill_seconds * done / all_ if done else 0.0
        return self.begun + saved + max(MAX_DELAY * self.prefill_seconds, MIN_DELAY_SECONDS)

    @property
    def seconds_per_block(self) -> float:
        """Mean time between its blocks so far; 0 until there is one."""
        if self.begun is None or not self._num_read:
            return 0.0
        return (time.monotonic() - self.begun) / self._num_read

    def hurry(self, prefill_seconds: float) -> None:
        """Begin to compare the rest with the time that computing it takes."""
        self._queued = time.monotonic()
        if self.begun is not None:
            self.begun, self._num_before = self._queued, self._num_read
        self.prefill_seconds = prefill_seconds

    def add(self, block: StoredBlock) -> None:
        """Add a block, unless the read has ended; wait while too many are not placed yet."""
        with self._lock:
            self._blocks.append(block)
            self._num_read += 1
        if len(self._blocks) * block.contents.nbytes < BATCH_BYTES:
            return
        self._room.acquire()
        with self._lock:
            if not self.ended:
                blocks, self._blocks = self._blocks, []
                self._on_blocks(self, blocks, False)

    def placed(self) -> None:
        """Make room for another batch."""
        self._room.release()

    def end(self, *, cancelled: bool = False, late: bool = False) -> bool:
        """End it and pass on its last blocks; return False if it had ended before."""
        with self._lock:
            if self.ended:
                return False
            self.ended, self.late = True, late
            if not cancelled:
                self._on_blocks(self, self._blocks, True)
        self._room.release()
        self.stop()
        return True


class Source(Protocol):
    """What blocks are read from."""

    rate: Rate

    def contents(self, read: Read) -> Generator[Bytes, None, None]:
        """Yield the contents of a read's blocks, in order, until one is missing.

        A source that may wait for long sets `read.stop`.
        """


class Reads:
    """The threads that read from sources of one kind, and the timer that ends late reads.

    Attributes:
        counters: Numbers since the start of blocks `read`, and reads that were `late`: computing
            was faster.
    """

    def __init__(self, name: str, threads: int) -> None:
        self.counters = Counter(read=0, late=0)
        self._num_threads = threads
        self._begun = threading.Condition()
        self._closed = False
        self._reads: SimpleQueue[tuple[Source, Read] | None] = SimpleQueue()
        self._hanging: set[Read] = set()  # ended, but their threads still wait for the source
        self._unended: list[Read] = []
        # An engine must be able to end while a disk hangs: so all threads are daemons.
        for work in (self._end_late_reads, *(threads * [self._read_blocks])):
            keep_thread_running(work, name)

    def worthwhile(self, source: Source, num_blocks: int, prefill_seconds: float) -> bool:
        """Return whether reading blocks is faster than computing, or may be."""
        if len(self._hanging) >= self._num_threads:
            return False
        return source.rate.worthwhile(num_blocks, prefill_seconds)

    def start(
        self, source: Source, keys: Sequence[bytes], prefill_seconds: float, on_blocks: OnBlocks
    ) -> Read:
        """Read blocks, in order.

        Args:
            source: What they are read from.
            keys: Their keys.
            prefill_seconds: Time that computing them takes; infinite for blocks that the source is
                still computing.
            on_blocks: Called from other threads, with each batch and at the end.
        """
        read = Read(keys, prefill_seconds, on_blocks)
        with self._begun:
            self._unended.append(read)
            self._begun.notify()
        self._reads.put((source, read))
        return read

    def hurry(self, read: Read, prefill_seconds: float) -> None:
        """End a read if computing is faster from now on."""
        with self._begun:
            read.hurry(prefill_seconds)
            self._begun.notify()

    def close(self) -> None:
        """Stop the threads."""
        self._closed = True
        with self._begun:
            self._begun.notify()
            for read in self._unended:
                read.stop()
        for _ in range(self._num_threads):
            self._reads.put(None)

    def _end_late_reads(self) -> None:
        while True:
            with self._begun:
                if self._closed:
                    return
                self._unended = [read for read in self._unended if not read.ended]
                now, hangs = time.monotonic(), len(self._hanging) >= self._num_threads
                late = [r for r in self._unended if r.due <= now or (hangs and r.begun is None)]
                if not late:
                    first = min((read.due for read in self._unended), default=math.inf)
                    self._begun.wait(min(first - now, threading.TIMEOUT_MAX))
            for read in late:
                if read.end(late=True):
                    self.counters["late"] += 1
                    if read.begun is not None:
                        self._hanging.add(read)
                    if read.left:  # meanwhile
                        self._hanging.discard(read)

    def _read_blocks(self) -> None:
        while (next_ := self._reads.get()) is not None:
            source, read = next_
            with self._begun:
                if not read.ended:
                    read.begun = time.monotonic()
                self._begun.notify()
            if not read.ended:
                self._read(source, read)
            read.left = True
            self._hanging.discard(read)

    def _read(self, source: Source, read: Read) -> None:
        began, blocks = time.perf_counter(), 0
        try:
            if not self.worthwhile(source, len(read.keys), read.prefill_seconds):  # any more
                return
            with closing(source.contents(read)) as contents:
                for key, block in zip(read.keys, contents, strict=False):
                    if read.ended:
                        break
                    read.add(StoredBlock(key, block))
                    blocks += 1
        finally:
            self.counters["read"] += blocks
            if read.follows:
                pass  # as fast as the blocks are computed
            elif blocks:
                source.rate.observe(blocks, time.perf_counter() - began)
            elif read.late:  # no faster than computing
                source.rate.observe(len(read.keys), read.prefill_seconds)
            read.end()
