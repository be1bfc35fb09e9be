"""The one door to the paged KV cache: block tables, sharing, swap, prefixes.

Blocks of `block_size` tokens are mapped to sequences by block tables, as in
"Efficient Memory Management for Large Language Model Serving with
PagedAttention" (Kwon et al., SOSP 2023, section 4). All methods either do the
whole of what they say or raise and change nothing.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.kv_cache.block_pool import BlockPool, OutOfBlocksError
from engine.kv_cache.block_table import ROOT_KEY, BlockTable, block_key

BlockPairs = list[tuple[int, int]]


class Span(NamedTuple):
    """Tokens [start, end) of a sequence."""

    sequence_id: int
    start: int
    end: int


@dataclass(slots=True)
class Transfers:
    """Copies to do before the next step computes, in this order.

    Attributes:
        swap_out: (device block, swap block).
        swap_in: (swap block, device block).
        copies: (device block, device block), for copy-on-write.
    """

    swap_out: BlockPairs = field(default_factory=list)
    swap_in: BlockPairs = field(default_factory=list)
    copies: BlockPairs = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.swap_in or self.copies)


@dataclass(frozen=True, slots=True)
class CacheStats:
    """How many blocks are in which state, at one moment.

    Attributes:
        total_blocks: on the device.
        free_blocks: of these, those that hold nothing.
        cached_blocks: of these, those that only the prefix cache keeps.
        shared_blocks: of these, those that several block-table entries hold.
        wasted_slots: places for a token, in device blocks that sequences
            hold, that no token has been given.
        total_swap_blocks: in CPU swap space.
        used_swap_blocks: of these, those that preempted sequences hold.
    """

    total_blocks: int
    free_blocks: int
    cached_blocks: int
    shared_blocks: int
    wasted_slots: int
    total_swap_blocks: int
    used_swap_blocks: int

    @property
    def used_blocks(self) -> int:
        """Device blocks that sequences hold."""
        return self.total_blocks - self.free_blocks - self.cached_blocks


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
        self._transfers = Transfers()

    # What there is.

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens take."""
        return -(-num_tokens // self.block_size)

    def table(self, sequence_id: int) -> list[int]:
        """The device blocks of a sequence, to read and not to change."""
        table = self._tables[sequence_id]
        assert not table.swapped, f"sequence {sequence_id} is swapped out"
        return table.blocks

    def holds(self, sequence_id: int) -> bool:
        """Whether a sequence has a block table, on the device or swapped out."""
        return sequence_id in self._tables

    @property
    def stats(self) -> CacheStats:
        """How many blocks are in which state now."""
        return CacheStats(
            total_blocks=self.device.num_blocks,
            free_blocks=self.device.num_free,
            cached_blocks=self.device.num_cached,
            shared_blocks=self.device.num_shared,
            wasted_slots=self._wasted_slots(),
            total_swap_blocks=self.swap.num_blocks,
            used_swap_blocks=self.swap.num_in_use,
        )

    def _wasted_slots(self) -> int:
        """Unused places in device blocks, by a look at each table's last: the others are full.

        Sequences that share their last block waste what the longest leaves.
        """
        filled: dict[int, int] = {}
        for table in self._tables.values():
            if table.blocks and not table.swapped:
                last = table.blocks[-1]
                tokens = table.num_tokens - (len(table.blocks) - 1) * self.block_size
                filled[last] = max(tokens, filled.get(last, 0))
        return len(filled) * self.block_size - sum(filled.values())

    def take_transfers(self) -> Transfers:
        """The copies gathered since the last call, which the caller must do."""
        transfers, self._transfers = self._transfers, Transfers()
        return transfers

    # Prefixes.

    def find_prefix(self, token_ids: Tokens[int]) -> list[int]:
        """Device blocks that already hold the front of `token_ids`.

        The last token is never among them: its logits must be computed.
        """
        if not self.prefix_caching:
            return []
        blocks: list[int] = []
        key = ROOT_KEY
        for end in range(self.block_size, len(token_ids), self.block_size):
            key = block_key(key, token_ids[end - self.block_size : end])
            block = self.device.find(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, sequence_id: int, token_ids: Tokens[int], num_computed: int) -> None:
        """Makes a sequence's full, computed blocks findable by other requests.

        Args:
            sequence_id: the sequence; on the device.
            token_ids: its tokens.
            num_computed: how many of them, from the front, have K/V.
        """
        if not self.prefix_caching:
            return
        table = self._tables[sequence_id]
        for i in range(len(table.keys), num_computed // self.block_size):
            parent = table.keys[-1] if table.keys else ROOT_KEY
            tokens = token_ids[i * self.block_size : (i + 1) * self.block_size]
            table.keys.append(block_key(parent, tokens))
            self.device.publish(table.blocks[i], table.keys[i])

    # A sequence's blocks.

    def admit(self, sequence_id: int, token_ids: Tokens[int], *, reuse: bool = True) -> int:
        """Gives a new sequence blocks for all its tokens, cached ones first.

        Args:
            sequence_id: not yet known here.
            token_ids: its tokens.
            reuse: look the prefix up in the cache.

        Returns:
            How many tokens, from the front, already have K/V.

        Raises:
            OutOfBlocksError: not enough blocks are available.
        """
        assert sequence_id not in self._tables
        prefix = self.find_prefix(token_ids) if reuse else []
        needed = self.blocks_for(len(token_ids)) - len(prefix)
        idle = sum(self.device.is_idle(block) for block in prefix)
        self._require(self.device, needed + idle)
        for block in prefix:
            self.device.share(block)
        fresh = [self.device.allocate() for _ in range(needed)]
        self._tables[sequence_id] = BlockTable(prefix + fresh, len(token_ids))
        return len(prefix) * self.block_size

    def blocks_to_admit(self, token_ids: Tokens[int], *, reuse: bool = True) -> int:
        """Available blocks that `admit` would take."""
        prefix = self.find_prefix(token_ids) if reuse else []
        idle = sum(self.device.is_idle(block) for block in prefix)
        return self.blocks_for(len(token_ids)) - len(prefix) + idle

    def extend(self, spans: Iterable[Span]) -> None:
        """Makes spans of tokens writable: grows tables, copies shared blocks.

        Raises:
            OutOfBlocksError: not enough blocks are available for all of them.
        """
        spans = list(spans)
        self._require(self.device, self._blocks_to_extend(spans))
        for sequence_id, start, end in spans:
            blocks = self.table(sequence_id)
            for i in self._shared(blocks, start, end):
                copy = self.device.allocate()
                if i * self.block_size < start:
                    self._transfers.copies.append((blocks[i], copy))
                self.device.release(blocks[i])
                blocks[i] = copy
            while len(blocks) < self.blocks_for(end):
                blocks.append(self.device.allocate())
            table = self._tables[sequence_id]
            table.num_tokens = max(table.num_tokens, end)

    def _blocks_to_extend(self, spans: Iterable[Span]) -> int:
        """Blocks that spans take; of those who write a shared block the last need not copy."""
        grown = 0
        writers: Counter[int] = Counter()
        for sequence_id, start, end in spans:
            blocks = self.table(sequence_id)
            grown += max(0, self.blocks_for(end) - len(blocks))
            writers.update(blocks[i] for i in self._shared(blocks, start, end))
        copied = (min(n, self.device.references(block) - 1) for block, n in writers.items())
        return grown + sum(copied)

    def _shared(self, blocks: list[int], start: int, end: int) -> list[int]:
        """Logical blocks that tokens [start, end) touch and others hold too."""
        reach = range(start // self.block_size, min(self.blocks_for(end), len(blocks)))
        return [i for i in reach if self.device.references(blocks[i]) > 1]

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Gives a new sequence its parent's first `num_tokens` tokens, shared."""
        assert child_id not in self._tables
        parent = self._tables[parent_id]
        assert not parent.swapped
        blocks = parent.blocks[: self.blocks_for(num_tokens)]
        for block in blocks:
            self.device.share(block)
        keys = parent.keys[: num_tokens // self.block_size]
        self._tables[child_id] = BlockTable(blocks, num_tokens, keys)

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Releases the blocks after a sequence's first `num_tokens` tokens."""
        blocks = self.table(sequence_id)
        while len(blocks) > self.blocks_for(num_tokens):
            self.device.release(blocks.pop())
        table = self._tables[sequence_id]
        table.num_tokens = min(table.num_tokens, num_tokens)

    def free(self, sequence_id: int) -> None:
        """Lets go of all that a sequence holds, wherever it is."""
        table = self._tables.pop(sequence_id)
        pool = self.swap if table.swapped else self.device
        for block in reversed(table.blocks):  # so that a prefix is evicted from its end
            pool.release(block)

    # Swap.

    def swap_out(self, sequence_ids: Iterable[int]) -> None:
        """Moves sequences to swap space; blocks they share stay shared there.

        Raises:
            OutOfBlocksError: swap space has not enough blocks.
        """
        moved = self._move(sequence_ids, self.device, self.swap, swapped=True)
        self._transfers.swap_out.extend(moved)

    def swap_in(self, sequence_ids: Iterable[int]) -> None:
        """Moves sequences back to the device.

        Raises:
            OutOfBlocksError: the device has not enough blocks.
        """
        moved = self._move(sequence_ids, self.swap, self.device, swapped=False)
        self._transfers.swap_in.extend(moved)

    def blocks_to_swap(self, sequence_ids: Iterable[int]) -> int:
        """Distinct blocks that sequences hold, which a swap would move."""
        return len({block for id_ in sequence_ids for block in self._tables[id_].blocks})

    def _move(
        self, sequence_ids: Iterable[int], source: BlockPool, target: BlockPool, *, swapped: bool
    ) -> BlockPairs:
        tables = [self._tables[id_] for id_ in sequence_ids]
        assert all(table.swapped is not swapped for table in tables)
        distinct = list(dict.fromkeys(block for table in tables for block in table.blocks))
        self._require(target, len(distinct))
        moved = {block: target.allocate() for block in distinct}
        holders = dict.fromkeys(distinct, 0)
        for table in tables:
            for block in table.blocks:
                holders[block] += 1
                if holders[block] > 1:
                    target.share(moved[block])
            for block in reversed(table.blocks):
                source.release(block)
            table.blocks = [moved[block] for block in table.blocks]
            table.swapped = swapped
            if not swapped:
                for block, key in zip(table.blocks, table.keys, strict=False):
                    target.publish(block, key)
        return list(moved.items())

    # Invariants.

    def _require(self, pool: BlockPool, needed: int) -> None:
        if needed > pool.num_available:
            raise OutOfBlocksError(f"{needed} blocks needed, {pool.num_available} available")

    def check(self) -> None:
        """Asserts the invariants of the pools and of every block table."""
        for pool, swapped in ((self.device, False), (self.swap, True)):
            pool.check()
            held = [0] * pool.num_blocks
            for table in self._tables.values():
                assert len(table.blocks) == self.blocks_for(table.num_tokens), "a table wastes"
                if table.swapped is swapped:
                    for block in table.blocks:
                        held[block] += 1
            assert held == list(map(pool.references, range(pool.num_blocks))), (
                "a reference count is not the number of block-table entries"
            )

    def check_idle(self) -> None:
        """Asserts that nothing is in use."""
        assert not self._tables, f"sequences left: {list(self._tables)[:8]}"
        assert self.device.num_in_use == 0
        assert self.swap.num_in_use == 0
