"""A pool of physical blocks: allocate, share, release, and remember contents.

Every block is in exactly one of three states: free (holds nothing), cached
(holds published contents that no block table refers to; evicted, least
recently used first, when free blocks run out) or in use (held by as many
block-table entries as its reference count says).
"""

from collections import OrderedDict
from itertools import chain


class OutOfBlocksError(Exception):
    """A pool has fewer blocks available than were asked for."""


class BlockPool:
    """Reference counts, the free list and the index of published contents."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._num_shared = 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._hit: set[bytes] = set()
        self._changed: set[bytes] = set()  # keys published or dropped since they were last taken

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that hold published contents and are not in use."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks that at least one block-table entry holds."""
        return self.num_blocks - self.num_available

    @property
    def num_shared(self) -> int:
        """Blocks that more than one block-table entry holds."""
        return self._num_shared

    def references(self, block: int) -> int:
        """How many block-table entries hold `block`."""
        return self._references[block]

    def is_idle(self, block: int) -> bool:
        """Whether no block-table entry holds `block`."""
        return self._references[block] == 0

    def allocate(self) -> int:
        """Gives a block that the caller alone holds; its contents are undefined.

        Raises:
            OutOfBlocksError: every block is in use.
        """
        block = self._take()
        self._references[block] = 1
        return block

    def allocate_together(self, count: int) -> list[int]:
        """Gives `count` blocks, side by side where free ones are; otherwise as `allocate`.

        Raises:
            OutOfBlocksError: fewer are available; none is taken.
        """
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} blocks needed, {self.num_available} available")
        while len(self._free) < count:
            self._free.append(self._evict())
        runs = _runs(sorted(self._free))
        fitting = next((run for run in runs if len(run) >= count), None)
        # Without a run that is long enough, the longest: so they are few.
        longest_first = [fitting] if fitting else sorted(runs, key=len, reverse=True)
        blocks = list(chain.from_iterable(longest_first))[:count]
        self._free = sorted(set(self._free).difference(blocks), reverse=True)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _take(self) -> int:
        return self._free.pop() if self._free else self._evict()

    def _evict(self) -> int:
        """Forgets what the cached block that was used longest ago holds."""
        if not self._cached:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are in use")
        block, _ = self._cached.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._changed.add(key)
        self._hit.discard(key)
        return block

    def share(self, block: int) -> None:
        """Adds a holder to a block that is in use or cached."""
        if self._references[block] == 0:
            del self._cached[block]  # a KeyError here is a free block: a broken caller
        self._references[block] += 1
        self._num_shared += self._references[block] == 2

    def release(self, block: int) -> None:
        """Takes a holder away; the last one leaves the block cached or free."""
        assert self._references[block] > 0, f"block {block} was released twice"
        self._references[block] -= 1
        self._num_shared -= self._references[block] == 1
        if self._references[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def restore(self, block: int) -> None:
        """Takes a `release` back; `block` must not have been given away since."""
        if self._references[block] == 0 and block not in self._cached:
            self._free.remove(block)
            self._cached[block] = None
        self.share(block)

    @property
    def next_evicted(self) -> tuple[int, bytes] | None:
        """The cached block, with its key, that `allocate` would evict now."""
        if self._free or not self._cached:
            return None
        block = next(iter(self._cached))
        return block, self._key_of[block]

    def keep(self, key: bytes) -> int | None:
        """Finds a place, in use by nobody, for contents that nobody holds.

        Returns:
            A cached block under `key`, for the caller to fill; None where there
            was one already, which is now the last to be evicted, or where every
            block is in use.
        """
        kept = self._block_of.get(key)
        if kept is not None:
            if self.is_idle(kept):
                self._cached.move_to_end(kept)
            return None
        if not self.num_available:
            return None
        block = self._take()
        self._block_of[key], self._key_of[block] = block, key
        self._changed.add(key)
        self._cached[block] = None
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Makes a full block that is in use findable by its contents' key.

        Where another block is already published under `key`, that one stays
        and this one remains private.
        """
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            self._changed.add(key)

    def find(self, key: bytes) -> int | None:
        """The block published under `key`, in use or cached."""
        return self._block_of.get(key)

    def mark_hit(self, key: bytes) -> None:
        """Notes that what is published under `key`, if anything, was found by a reader."""
        if key in self._block_of:
            self._hit.add(key)

    def was_hit(self, key: bytes) -> bool:
        """Whether what is published under `key` was found by a reader."""
        return key in self._hit

    def take_changed(self) -> set[bytes]:
        """The keys published or dropped since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def forget_contents(self) -> None:
        """Unpublishes everything: no block's contents can be trusted any more."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._changed.update(self._block_of)
        self._key_of.clear()
        self._block_of.clear()
        self._hit.clear()

    def check(self) -> None:
        """Asserts that free, cached and in-use blocks partition the pool."""
        free, cached = set(self._free), set(self._cached)
        idle = {block for block, count in enumerate(self._references) if count == 0}
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert free | cached == idle, "free and cached blocks must be the idle ones"
        assert not free & cached, "a block is both free and cached"
        assert cached <= set(self._key_of), "a cached block has no key"
        assert not free & set(self._key_of), "a free block has a key"
        shared = sum(count > 1 for count in self._references)
        assert self._num_shared == shared, "shared blocks are miscounted"
        assert {block: key for key, block in self._block_of.items()} == self._key_of
        assert self._hit <= set(self._block_of), "contents that are gone count as hit"


def _runs(blocks: list[int]) -> list[list[int]]:
    """Rising numbers, cut where they do not follow on each other."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
