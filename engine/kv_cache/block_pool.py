"""A pool of physical blocks: allocate, share, release, and keep contents for reuse.

Every block is in exactly one of three states: free (holds nothing), cached (holds published
contents and is in no block table; the least recently used is evicted first when free blocks run
out) or in use (its reference count is the number of block-table entries that hold it).
"""

from collections import OrderedDict
from collections.abc import Set as AbstractSet
from itertools import chain


class OutOfBlocksError(Exception):
    """A pool has fewer blocks available than requested."""


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
        """Blocks that `allocate` can return."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        """Blocks that at least one block-table entry holds."""
        return self.num_blocks - self.num_available

    @property
    def num_shared(self) -> int:
        """Blocks that more than one block-table entry holds."""
        return self._num_shared

    def require(self, count: int) -> None:
        """Check that `count` blocks are available.

        Raises:
            OutOfBlocksError: Fewer are available.
        """
        if count > self.num_available:
            raise OutOfBlocksError(f"{count} blocks needed, {self.num_available} available")

    def references(self, block: int) -> int:
        """Return the number of block-table entries that hold `block`."""
        return self._references[block]

    def is_idle(self, block: int) -> bool:
        """Return whether no block-table entry holds `block`."""
        return self._references[block] == 0

    def allocate(self) -> int:
        """Return a block that only the caller holds; its contents are undefined.

        Raises:
            OutOfBlocksError: Every block is in use.
        """
        block = self._take()
        self._references[block] = 1
        return block

    def allocate_together(self, count: int) -> list[int]:
        """Return `count` blocks; they are adjacent if enough adjacent ones are free.

        Raises:
            OutOfBlocksError: Fewer are available; none is allocated.
        """
        self.require(count)
        while len(self._free) < count:
            self._free.append(self._evict())
        runs = _runs(sorted(self._free))
        fitting = next((run for run in runs if len(run) >= count), None)
        # Without a long enough run, take the longest runs, so that they are few.
        longest_first = [fitting] if fitting else sorted(runs, key=len, reverse=True)
        blocks = list(chain.from_iterable(longest_first))[:count]
        self._free = sorted(set(self._free).difference(blocks), reverse=True)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def _take(self) -> int:
        return self._free.pop() if self._free else self._evict()

    def _evict(self) -> int:
        """Forget the contents of the least recently used cached block, and return the block."""
        if not self._cached:
            raise OutOfBlocksError(f"all {self.num_blocks} blocks are in use")
        block, _ = self._cached.popitem(last=False)
        key = self._key_of.pop(block)
        del self._block_of[key]
        self._changed.add(key)
        self._hit.discard(key)
        return block

    def share(self, block: int) -> None:
        """Add a holder to a block that is in use or cached."""
        if self._references[block] == 0:
            del self._cached[block]  # a KeyError: the caller must not share a free block
        self._references[block] += 1
        self._num_shared += self._references[block] == 2

    def release(self, block: int) -> None:
        """Remove a holder; without holders the block is cached if published, else free."""
        assert self._references[block] > 0, f"block {block} was released twice"
        self._references[block] -= 1
        self._num_shared -= self._references[block] == 1
        if self._references[block] == 0:
            if block in self._key_of:
                self._cached[block] = None
            else:
                self._free.append(block)

    def undo_release(self, block: int) -> None:
        """Undo a `release`; the block must not have been allocated since."""
        if self._references[block] == 0 and block not in self._cached:
            self._free.remove(block)
            self._cached[block] = None
        self.share(block)

    @property
    def next_evicted(self) -> tuple[int, bytes] | None:
        """The cached block that `allocate` would evict next, with its key."""
        if self._free or not self._cached:
            return None
        block = next(iter(self._cached))
        return block, self._key_of[block]

    def reserve_cached(self, key: bytes) -> int | None:
        """Publish a cached block under `key`, for the caller to fill.

        Returns:
            The block. None if every block is in use, or if `key` has a block already, which then
            becomes the last to be evicted.
        """
        existing = self._block_of.get(key)
        if existing is not None:
            if self.is_idle(existing):
                self._cached.move_to_end(existing)
            return None
        if not self.num_available:
            return None
        block = self._take()
        self._block_of[key], self._key_of[block] = block, key
        self._changed.add(key)
        self._cached[block] = None
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Make a full block that is in use findable by its contents' key.

        If another block is already published under `key`, it stays and this one remains private.
        """
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key
            self._changed.add(key)

    def find(self, key: bytes) -> int | None:
        """Return the block published under `key`, in use or cached."""
        return self._block_of.get(key)

    def held_of(self, keys: AbstractSet[bytes]) -> set[bytes]:
        """Return the given keys that have a published block."""
        return self._block_of.keys() & keys

    def mark_hit(self, key: bytes) -> None:
        """Mark the block published under `key`, if any, as reused by a request."""
        if key in self._block_of:
            self._hit.add(key)

    def was_hit(self, key: bytes) -> bool:
        """Return whether a request reused the block published under `key`."""
        return key in self._hit

    def is_published(self, block: int) -> bool:
        """Return whether a block is published."""
        return block in self._key_of

    def unpublish(self, block: int) -> None:
        """Make a block in use private again, if it is published."""
        assert self._references[block] > 0
        if (key := self._key_of.pop(block, None)) is not None:
            del self._block_of[key]
            self._changed.add(key)
            self._hit.discard(key)

    def forget(self, key: bytes) -> None:
        """Free the cached block published under `key`, if any."""
        block = self._block_of.get(key)
        if block is not None and self.is_idle(block):
            del self._cached[block], self._block_of[key], self._key_of[block]
            self._changed.add(key)
            self._hit.discard(key)
            self._free.append(block)

    def take_changed(self) -> set[bytes]:
        """Return the keys published or dropped since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def forget_contents(self) -> None:
        """Unpublish everything: blocks' contents can no longer be trusted."""
        self._free.extend(self._cached)
        self._cached.clear()
        self._changed.update(self._block_of)
        self._key_of.clear()
        self._block_of.clear()
        self._hit.clear()

    def check(self) -> None:
        """Assert that free, cached and in-use blocks partition the pool."""
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
    """Split ascending numbers into runs of consecutive ones."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] + 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return runs
