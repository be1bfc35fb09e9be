"""The manager of the paged KV cache: block tables, sharing, swap, prefixes.

Blocks of `block_size` tokens are mapped to sequences by block tables, as in
"Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., SOSP 2023, section 4). A method that raises changes nothing.

Swap space has two uses. It holds preempted sequences. The rest of it caches prefix
blocks that the device evicted (offloaded), which a later match copies back (restored).
A preempted sequence evicts these, never the reverse. Only a prefix that was hit is
offloaded: one that a sequence was admitted with since it was computed. Copying what is
read only once would slow the steps for nothing. A prefix counts as hit until neither
memory has it.

Copies are ordered at once and done before the step computes, all `swap_out`
before all `swap_in` before all `copies`. So a device block may be swapped out and
allocated again in the same step. A swap block that is read in a step stays in use until
its copy has been taken (`_reading`), so that nothing overwrites it first.
Sequences that got blocks in a step keep them until its copies are taken.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from octavo.common.prefix import block_key, root_key
from octavo.engine.kv_cache.block_pool import BlockPool, OutOfBlocksError
from octavo.engine.kv_cache.block_table import BlockTable
from octavo.engine.kv_cache.transfers import Transfers


class Span(NamedTuple):
    """Tokens [start, end) of a sequence."""

    sequence_id: int
    start: int
    end: int


class Hit(NamedTuple):
    """A full block of a prompt that is cached, in swap space if `swapped`."""

    key: bytes
    block: int
    swapped: bool


@dataclass(slots=True)
class CacheCounters:
    """Events since the start, for metrics and tests.

    Attributes:
        offloaded_blocks: prefix blocks copied to swap space when evicted.
        restored_blocks: prefix blocks copied back instead of recomputed.
    """

    offloaded_blocks: int = 0
    restored_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Numbers of blocks by state, at one moment.

    Attributes:
        total_blocks: on the device.
        free_blocks: of these, those that hold nothing.
        cached_blocks: of these, those that only the prefix cache keeps.
        shared_blocks: of these, those that several block-table entries hold.
        wasted_slots: places for a token, in device blocks that sequences
            hold, that no token has been given.
        total_swap_blocks: in CPU swap space.
        used_swap_blocks: of these, those that preempted sequences hold.
        cached_swap_blocks: of these, those that only the prefix cache keeps.
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    shared_blocks: int
    wasted_slots: int
    total_swap_blocks: int
    used_swap_blocks: int
    cached_swap_blocks: int

    @property
    def used_blocks(self) -> int:
        """Device blocks that sequences hold."""
        return self.total_blocks - self.free_blocks - self.cached_blocks

    @property
    def usage_ratio(self) -> float:
        """Share of the device blocks that sequences hold, 0 to 1."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def free_swap_blocks(self) -> int:
        """Blocks of swap space that hold nothing."""
        return self.total_swap_blocks - self.used_swap_blocks - self.cached_swap_blocks


class KVCacheManager:
    """Allocates, shares, copies on write, swaps and frees blocks."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_swap_blocks: int, prefix_caching: bool
    ) -> None:
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.device = BlockPool(num_blocks)
        self.swap = BlockPool(num_swap_blocks)
        self._tables: dict[int, BlockTable] = {}
        self.counters = CacheCounters()
        self._transfers = Transfers()
        self._offloading: dict[int, int] = {}  # swap block: the evicted device block copied there
        self.published: set[bytes] = set()
        self._reading: list[int] = []  # swap blocks held until the copies from them are taken

    # State.

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def table(self, sequence_id: int) -> list[int]:
        """Return the device blocks of a sequence; do not change them."""
        table = self._tables[sequence_id]
        assert not table.swapped, f"sequence {sequence_id} is swapped out"
        return table.blocks

    def holds(self, sequence_id: int) -> bool:
        """Return whether a sequence has a block table, on the device or swapped out."""
        return sequence_id in self._tables

    @property
    def stats(self) -> CacheStats:
        """The numbers of blocks by state now."""
        return CacheStats(
            total_blocks=self.device.num_blocks,
            free_blocks=self.device.num_free,
            cached_blocks=self.device.num_cached,
            shared_blocks=self.device.num_shared,
            wasted_slots=self._wasted_slots(),
            total_swap_blocks=self.swap.num_blocks,
            used_swap_blocks=self.swap.num_in_use,
            cached_swap_blocks=self.swap.num_cached,
        )

    def _wasted_slots(self) -> int:
        """Return the unused slots in device blocks. Only a table's last block can have some.

        Of sequences that share their last block, the longest counts.
        """
        filled: dict[int, int] = {}
        for table in self._tables.values():
            if table.blocks and not table.swapped:
                last = table.blocks[-1]
                tokens = table.num_tokens - (len(table.blocks) - 1) * self.block_size
                filled[last] = max(tokens, filled.get(last, 0))
        return len(filled) * self.block_size - sum(filled.values())

    def take_transfers(self) -> Transfers:
        """Return the copies ordered since the last call; the caller must do them."""
        while self._reading:
            self.swap.release(self._reading[-1])
            self._reading.pop()
        transfers, self._transfers = self._transfers, Transfers()
        transfers.swap_out += [(block, kept) for kept, block in self._offloading.items()]
        self.counters.offloaded_blocks += len(self._offloading)
        self._offloading.clear()
        return transfers

    def forget_contents(self) -> None:
        """Drop copies not yet taken and unpublish everything: no contents can be trusted."""
        self.take_transfers()
        self.device.forget_contents()
        self.swap.forget_contents()

    def _allocate(self) -> int:
        """Allocate a device block; a prefix block evicted for it is offloaded if it was hit."""
        if (evicted := self.device.next_evicted) is not None and self.device.was_hit(evicted[1]):
            block, key = evicted
            if (kept := self.swap.reserve_cached(key)) is not None:
                self.swap.mark_hit(key)
                self._offloading[kept] = block
        return self.device.allocate()

    def _allocate_in_swap(self, count: int) -> list[int]:
        """Allocate blocks of swap space, adjacent ones if possible, so that copies are few."""
        blocks = self.swap.allocate_together(count)
        for block in blocks:
            self._offloading.pop(block, None)  # what was to be offloaded there was just evicted
        return blocks

    # Prefixes.

    def find_prefix(self, token_ids: Tokens[int], salt: str = "") -> list[Hit]:
        """Return the blocks that already hold the front of `token_ids`.

        The last token is never among them: its logits must be computed.
        """
        if not self.prefix_caching:
            return []
        hits: list[Hit] = []
        key = root_key(salt)
        for end in range(self.block_size, len(token_ids), self.block_size):
            key = block_key(key, token_ids[end - self.block_size : end])
            if (block := self.device.find(key)) is not None:
                hits.append(Hit(key, block, swapped=False))
            elif (block := self.swap.find(key)) is not None:
                hits.append(Hit(key, block, swapped=True))
            else:
                break
        return hits

    def publish(self, sequence_id: int, token_ids: Tokens[int], num_computed: int) -> None:
        """Make a sequence's full, computed blocks findable by other requests.

        Args:
            sequence_id: the sequence; on the device.
            token_ids: its tokens.
            num_computed: how many of them, from the front, have K/V.
        """
        if not self.prefix_caching:
            return
        table = self._tables[sequence_id]
        for i in range(len(table.keys), num_computed // self.block_size):
            parent = table.keys[-1] if table.keys else table.root
            tokens = token_ids[i * self.block_size : (i + 1) * self.block_size]
            table.keys.append(block_key(parent, tokens))
            self._publish(self.device, table.blocks[i], table.keys[i])

    def _publish(self, pool: BlockPool, block: int, key: bytes) -> None:
        """Make a block findable; a key that was hit in one pool is marked hit in the other."""
        pool.publish(block, key)
        if self.device.was_hit(key) or self.swap.was_hit(key):
            pool.mark_hit(key)

    def take_changes(self) -> tuple[set[bytes], set[bytes]]:
        """Update `published`, the keys of prefix blocks in either pool.

        Returns:
            The keys added, and the keys removed, since the last call.
        """
        changed = self.device.take_changed() | self.swap.take_changed()
        held = {
            key
            for key in changed
            if self.device.find(key) is not None or self.swap.find(key) is not None
        }
        added, removed = held - self.published, (changed - held) & self.published
        self.published ^= added | removed
        return added, removed

    # A sequence's blocks.

    def admit(
        self, sequence_id: int, token_ids: Tokens[int], *, reuse: bool = True, salt: str = ""
    ) -> int:
        """Allocate blocks for all tokens of a new sequence; use cached ones where possible.

        Args:
            sequence_id: a new id.
            token_ids: its tokens.
            reuse: look the prefix up in the cache.
            salt: only blocks of sequences with the same salt are shared.

        Returns:
            How many tokens, from the front, already have K/V.

        Raises:
            OutOfBlocksError: not enough blocks are available.
        """
        assert sequence_id not in self._tables
        hits = self.find_prefix(token_ids, salt) if reuse else []
        self._require(self.device, self._blocks_beside(hits, len(token_ids)))
        table = BlockTable([], len(token_ids), root_key(salt), [hit.key for hit in hits])
        with ExitStack() as undo:
            for hit in hits:  # all of them before anything is evicted
                pool = self.swap if hit.swapped else self.device
                pool.share(hit.block)
                undo.callback(pool.release, hit.block)
            for i in range(self.blocks_for(len(token_ids))):
                if i < len(hits) and not hits[i].swapped:
                    table.blocks.append(hits[i].block)
                else:
                    table.blocks.append(self._allocate())
                    undo.callback(self.device.release, table.blocks[i])
            undo.pop_all()
        self._tables[sequence_id] = table
        for block, hit in zip(table.blocks, hits, strict=False):
            if hit.swapped:
                self._reading.append(hit.block)
                self._transfers.swap_in.append((hit.block, block))
                self._publish(self.device, block, hit.key)
                self.counters.restored_blocks += 1
            self.device.mark_hit(hit.key)
            self.swap.mark_hit(hit.key)
        return len(hits) * self.block_size

    def blocks_to_admit(self, token_ids: Tokens[int], *, reuse: bool = True, salt: str = "") -> int:
        """Return how many of the available blocks `admit` would take."""
        hits = self.find_prefix(token_ids, salt) if reuse else []
        return self._blocks_beside(hits, len(token_ids))

    def _blocks_beside(self, hits: list[Hit], num_tokens: int) -> int:
        """Return how many available blocks `num_tokens` tokens take, those in use not counted."""
        held = sum(not hit.swapped and not self.device.is_idle(hit.block) for hit in hits)
        return self.blocks_for(num_tokens) - held

    def extend(self, spans: Iterable[Span]) -> None:
        """Make spans of tokens writable: grow block tables, copy shared blocks.

        Raises:
            OutOfBlocksError: not enough blocks are available for all of them.
        """
        writes = [(span, self._shared(span)) for span in spans]
        self._require(self.device, self._blocks_to_extend(writes))
        for span, shared in writes:
            table, start, end = self._tables[span.sequence_id], span.start, span.end
            blocks = table.blocks
            for i in self._shared(span) if shared else ():  # others may have copied theirs
                copy = self._allocate()
                if i * self.block_size < start:
                    self._transfers.copies.append((blocks[i], copy))
                self.device.release(blocks[i])
                blocks[i] = copy
            while len(blocks) < self.blocks_for(end):
                blocks.append(self._allocate())
            table.num_tokens = max(table.num_tokens, end)

    def _blocks_to_extend(self, writes: list[tuple[Span, list[int]]]) -> int:
        """Return how many blocks spans take; the last writer of a shared block need not copy it."""
        grown, written = 0, list[int]()
        for span, shared in writes:
            blocks = self.table(span.sequence_id)
            grown += max(0, self.blocks_for(span.end) - len(blocks))
            written += [blocks[i] for i in shared]
        if not written:
            return grown
        writers = Counter(written).items()
        return grown + sum(min(n, self.device.references(block) - 1) for block, n in writers)

    def _shared(self, span: Span) -> list[int]:
        """Return the logical blocks that a span writes and that other tables hold too."""
        blocks, references = self.table(span.sequence_id), self.device.references
        reach = range(span.start // self.block_size, min(self.blocks_for(span.end), len(blocks)))
        return [i for i in reach if references(blocks[i]) > 1]

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Share a parent's first `num_tokens` tokens with a new sequence."""
        assert child_id not in self._tables
        parent = self._tables[parent_id]
        assert not parent.swapped
        blocks = parent.blocks[: self.blocks_for(num_tokens)]
        with ExitStack() as undo:
            for block in blocks:
                self.device.share(block)
                undo.callback(self.device.release, block)
            undo.pop_all()
        keys = parent.keys[: num_tokens // self.block_size]
        self._tables[child_id] = BlockTable(blocks, num_tokens, parent.root, keys)

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Release the blocks after a sequence's first `num_tokens` tokens."""
        blocks = self.table(sequence_id)
        while len(blocks) > self.blocks_for(num_tokens):
            self.device.release(blocks.pop())
        table = self._tables[sequence_id]
        table.num_tokens = min(table.num_tokens, num_tokens)

    def free(self, sequence_id: int) -> None:
        """Release all blocks of a sequence, on the device or in swap space."""
        table = self._tables.pop(sequence_id)
        pool = self.swap if table.swapped else self.device
        for block in reversed(table.blocks):  # so that a prefix is evicted from its end
            pool.release(block)

    # Swap.

    def swap_out(self, sequence_ids: Iterable[int]) -> None:
        """Move sequences to swap space; blocks that they share stay shared there.

        Raises:
            OutOfBlocksError: swap space has not enough blocks.
        """
        self._transfers.swap_out += self._move(sequence_ids, self.device, self.swap)

    def swap_in(self, sequence_ids: Iterable[int]) -> None:
        """Move sequences back to the device.

        Raises:
            OutOfBlocksError: the device has not enough blocks.
        """
        moved = self._move(sequence_ids, self.swap, self.device)
        self._reading += [block for block, _ in moved]
        self._transfers.swap_in += moved

    def blocks_to_swap(self, sequence_ids: Iterable[int]) -> int:
        """Return how many distinct blocks sequences hold, the most that a swap copies."""
        return len({block for id_ in sequence_ids for block in self._tables[id_].blocks})

    def _move(
        self, sequence_ids: Iterable[int], source: BlockPool, target: BlockPool
    ) -> list[tuple[int, int]]:
        """Move sequences' blocks from one pool to the other.

        Returns:
            The copies to do; blocks whose contents `target` has already need none.
        """
        tables = [self._tables[id_] for id_ in sequence_ids]
        assert all(table.swapped is (source is self.swap) for table in tables)
        holders = Counter(block for table in tables for block in table.blocks)
        moved = {
            block: there
            for table in tables
            for block, key in zip(table.blocks, table.keys, strict=False)
            if (there := target.find(key)) is not None
        }
        copied = [block for block in holders if block not in moved]
        idle = sum(target.is_idle(block) for block in set(moved.values()))
        self._require(target, len(copied) + idle)
        with ExitStack() as undo:
            for there in moved.values():  # all of them before anything is evicted
                target.share(there)
                undo.callback(target.release, there)
            if target is self.swap:
                moved.update(zip(copied, self._allocate_in_swap(len(copied)), strict=True))
                for block in copied:
                    undo.callback(target.release, moved[block])
            else:
                for block in copied:
                    moved[block] = self._allocate()
                    undo.callback(target.release, moved[block])
                    source.share(block)  # for `_reading`
                    undo.callback(source.release, block)
            for block, count in holders.items():
                for _ in range(count - 1):
                    target.share(moved[block])
                    undo.callback(target.release, moved[block])
            for table in tables:
                for block in reversed(table.blocks):  # so that a prefix is evicted from its end
                    source.release(block)
                    undo.callback(source.undo_release, block)
            undo.pop_all()
        for table in tables:
            table.blocks = [moved[block] for block in table.blocks]
            table.swapped = target is self.swap
            for block, key in zip(table.blocks, table.keys, strict=False):
                self._publish(target, block, key)
        return [(block, moved[block]) for block in copied]

    # Invariants.

    def _require(self, pool: BlockPool, needed: int) -> None:
        if needed > pool.num_available:
            raise OutOfBlocksError(f"{needed} blocks needed, {pool.num_available} available")

    def check(self) -> None:
        """Assert the invariants of the pools and of every block table."""
        for pool, swapped in ((self.device, False), (self.swap, True)):
            pool.check()
            held = [0] * pool.num_blocks
            for table in self._tables.values():
                assert len(table.blocks) == self.blocks_for(table.num_tokens), (
                    "a table has more blocks than its tokens need"
                )
                if table.swapped is swapped:
                    for block in table.blocks:
                        held[block] += 1
            for block in self._reading if swapped else ():
                held[block] += 1
            assert held == list(map(pool.references, range(pool.num_blocks))), (
                "a reference count is not the number of block-table entries"
            )

    def check_idle(self) -> None:
        """Assert that no block is in use."""
        assert not self._tables, f"sequences left: {list(self._tables)[:8]}"
        assert self.device.num_in_use == 0
        assert self.swap.num_in_use == 0
