"""The manager of the paged KV cache: block tables, sharing, swap, prefixes.

Blocks are mapped to sequences by block tables, as in "Efficient Memory Management for Large
Language Model Serving with PagedAttention" (Kwon et al., SOSP 2023, section 4). Each layer group
has its own table for each sequence (`octavo.common.kv_cache.layer_groups`), and all groups take
blocks from one pool. A method that raises changes nothing, except that blocks outside a window stay
released or spilled.

`prefixes.py` makes blocks findable by other requests and finds them, `swap_moves.py` orders copies,
`spilled_sequence.py` moves a sequence's earlier blocks to a file. Sequences that got blocks in a
step keep them until its copies are taken.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from contextlib import ExitStack

import numpy as np

from octavo.common.kv_cache.layer_groups import LayerGroup, blocks_held
from octavo.engine.kv_cache.block_pool import BlockPool
from octavo.engine.kv_cache.block_table import RELEASED, BlockTable, Span
from octavo.engine.kv_cache.copy_on_write import blocks_to_write, shared_entries
from octavo.engine.kv_cache.invariants import check_pool, check_table
from octavo.engine.kv_cache.prefixes import Hit, Prefix, PrefixCache
from octavo.engine.kv_cache.spilled_sequence import SpilledSequence
from octavo.engine.kv_cache.stats import wasted_slots
from octavo.engine.kv_cache.swap_moves import SwapMoves
from octavo.engine.kv_cache.transfers import Transfers


class KVCacheManager:
    """Allocates, shares, copies on write, swaps and frees blocks.

    Attributes:
        groups: The model's layer groups.
        device: The device's blocks.
        swap: The blocks of swap space.
        spilled: The sequence that has more tokens than stay in blocks.
        prefixes: Finds and publishes prefixes in both.
        moves: Orders copies between both.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        groups: Iterable[LayerGroup],
        num_swap_blocks: int,
        prefix_caching: bool,
        step_tokens: int,
    ) -> None:
        """Create an empty cache.

        Args:
            num_blocks: Number of blocks on the device.
            groups: The model's layer groups.
            num_swap_blocks: Number of blocks in swap space.
            prefix_caching: Whether requests with a common prefix share its blocks.
            step_tokens: Maximum tokens of a sequence that a step computes.
        """
        self.groups = tuple(groups)
        self.block_size = min(group.block_size for group in self.groups)
        self.prefix_caching = prefix_caching
        self.device = BlockPool(num_blocks)
        self.swap = BlockPool(num_swap_blocks)
        self._step_tokens = step_tokens
        self.prefixes = PrefixCache(self.groups, self.device, self.swap)
        self.moves = SwapMoves(self.device, self.swap, self.prefixes)
        self._keeps_states = prefix_caching and self.prefixes.keeps_states
        self._grows_only = not any(g.state_blocks or g.bounded for g in self.groups)
        self.spilled = SpilledSequence(self.groups, self.moves)
        self._tables: dict[int, BlockTable] = {}

    # State.

    def blocks_for(self, num_tokens: int) -> int:
        """Return the maximum number of blocks that a sequence of `num_tokens` tokens ever holds."""
        return blocks_held(self.groups, num_tokens, self._step_tokens)

    def table(self, sequence_id: int) -> list[list[int]]:
        """Return each layer group's device blocks of a sequence; do not change them."""
        table = self._tables[sequence_id]
        assert not table.swapped, f"sequence {sequence_id} is swapped out"
        return table.groups

    def num_units(self, sequence_id: int) -> int:
        """Return the number of units of the file that hold a sequence's first tokens."""
        is_spilled = sequence_id == self.spilled.id
        return self.spilled.num_units(self._tables[sequence_id]) if is_spilled else 0

    def holds(self, sequence_id: int) -> bool:
        """Return whether a sequence has a block table, on the device or swapped out."""
        return sequence_id in self._tables

    @property
    def wasted_slots(self) -> int:
        """Places for a token in blocks that sequences hold, that no token has; see `stats.py`."""
        tables = self._tables.values()
        if not self._grows_only or self.device.num_shared:
            return wasted_slots(self.groups, tables)
        ends = np.array([table.num_tokens for table in tables if not table.swapped], np.int64)
        return sum(
            int((-ends % group.block_size * self.block_size // group.block_size).sum())
            for group in self.groups
        )

    def take_transfers(self) -> Transfers:
        """Return the copies ordered since the last call; the caller must do them."""
        return self.moves.take_transfers()

    def forget_contents(self) -> None:
        """Drop pending copies and unpublish everything: contents cannot be trusted."""
        self.take_transfers()
        self.prefixes.take_unsaved()
        self.device.forget_contents()
        self.swap.forget_contents()

    # Prefixes.

    def find_prefix(self, token_ids: Tokens[int], salt: str = "") -> Prefix:
        """Return the blocks that already hold a prefix of `token_ids`.

        They never include the last token, whose logits must be computed.
        """
        return self.prefixes.find(token_ids, salt) if self.prefix_caching else self.prefixes.nothing

    def publish(self, sequence_id: int, token_ids: Tokens[int], num_computed: int) -> None:
        """Make a sequence's full, computed blocks findable; see `PrefixCache.publish`."""
        if self.prefix_caching:
            self.prefixes.publish(self._tables[sequence_id], token_ids, num_computed)

    def pause_before(self, sequence_id: int, start: int, end: int) -> int:
        """Return the end for a prefill; see `PrefixCache.pause_before`."""
        if not self.prefix_caching:
            return end
        return self.prefixes.pause_before(self._tables[sequence_id], start, end)

    # A sequence's blocks.

    def admit(
        self, sequence_id: int, token_ids: Tokens[int], *, reuse: bool = True, salt: str = ""
    ) -> int:
        """Allocate blocks for the tokens of a new sequence; reuse cached ones if possible.

        They are for all tokens, but for no more than a group keeps.

        Args:
            sequence_id: A new id.
            token_ids: Its tokens.
            reuse: Whether to look the prefix up in the cache.
            salt: Salt; only sequences with the same salt share blocks.

        Returns:
            The number of leading tokens that already have K/V.

        Raises:
            OutOfBlocksError: Not enough blocks are available.
        """
        assert sequence_id not in self._tables
        prefix = self.find_prefix(token_ids, salt) if reuse else self.prefixes.nothing
        num_tokens = min(len(token_ids), self.spilled.kept)
        self.device.require(self._blocks_beside(prefix, num_tokens))
        table = BlockTable([], num_tokens, [], salt=salt, keys=list(prefix.keys))
        table.branch = prefix.reach if prefix.reach > prefix.num_tokens else 0
        table.computed = prefix.num_tokens
        restored: list[tuple[Hit, int]] = []
        taken: list[int] = []
        with ExitStack() as undo:
            for hit in prefix.hits():  # share all hits before anything is evicted
                pool = self.swap if hit.swapped else self.device
                pool.share(hit.block)
                undo.callback(pool.release, hit.block)
            undo.callback(self._release, taken)
            for group, hits in enumerate(prefix.groups):
                first, end = self._reserved(group, prefix.num_tokens, num_tokens)
                table.passed.append(first)
                blocks = [RELEASED] * first
                table.groups.append(blocks)
                for i in range(end - first):
                    known = hits[i] if i < len(hits) else None
                    if known is not None and not known.swapped:
                        blocks.append(known.block)
                        continue
                    block = self.moves.allocate()
                    blocks.append(block)
                    taken.append(block)
                    if known is not None:
                        restored.append((known, block))
            undo.pop_all()
        self._tables[sequence_id] = table
        for hit, block in restored:
            self.moves.restore(hit.block, block, hit.key)
        for hit in prefix.hits():
            self.device.mark_hit(hit.key)
            self.swap.mark_hit(hit.key)
        return prefix.num_tokens

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.device.release(block)

    def blocks_to_admit(self, token_ids: Tokens[int], *, reuse: bool = True, salt: str = "") -> int:
        """Return the number of available blocks that `admit` would take."""
        prefix = self.find_prefix(token_ids, salt) if reuse else self.prefixes.nothing
        return self._blocks_beside(prefix, min(len(token_ids), self.spilled.kept))

    def _reserved(self, group: int, num_cached: int, num_tokens: int) -> tuple[int, int]:
        """Return the first block that a new sequence needs, and the end of its initial blocks.

        Groups that release blocks initially get those of the first step only.
        """
        layers = self.groups[group]
        if layers.state_blocks:
            return 0, layers.state_blocks
        if layers.bounded:
            num_tokens = min(num_tokens, num_cached + self._step_tokens)
        return layers.first_block(num_cached), layers.blocks_for(num_tokens)

    def _blocks_beside(self, prefix: Prefix, num_tokens: int) -> int:
        """Return the available blocks that `num_tokens` tokens take, besides those in use.

        A state that is in use is copied at once.
        """
        kept = zip(self.groups, prefix.groups, strict=True)
        hits = (hit for layers, each in kept if not layers.state_blocks for hit in each)
        held = sum(not hit.swapped and not self.device.is_idle(hit.block) for hit in hits)
        spans = [self._reserved(g, prefix.num_tokens, num_tokens) for g in range(len(self.groups))]
        return sum(end - first for first, end in spans) - held

    def reserve(self, sequence_id: int, end: int) -> None:
        """Grow the tables of unbounded groups to `end` tokens, to reserve a prefill's blocks.

        A group that spills gets no more than it keeps.

        Raises:
            OutOfBlocksError: Not enough blocks are available.
        """
        self.device.require(self.blocks_to_reserve(sequence_id, end))
        table, end = self._tables[sequence_id], min(end, self.spilled.kept)
        self._grow(table, end, (g for g, layers in enumerate(self.groups) if not layers.bounded))
        table.num_tokens = max(table.num_tokens, end)

    def blocks_to_reserve(self, sequence_id: int, end: int) -> int:
        """Return the number of blocks that `reserve`, then the first step of others, take.

        The sequence may be swapped out.
        """
        table, needed = self._tables[sequence_id], 0
        for layers, blocks in zip(self.groups, table.groups, strict=True):
            if not layers.state_blocks:
                least, soon = end, table.computed + self._step_tokens
                if layers.releases:
                    least = min(end, max(soon, layers.kept or 0))
                needed += max(0, layers.blocks_for(least) - len(blocks))
        return needed

    def blocks_to_share(self, sequence_ids: Iterable[int]) -> int:
        """Return the number of copies so that no two of some sequences write the same block.

        They write their states and the blocks of their next tokens. They may be swapped out.
        """
        written: Counter[tuple[int, int]] = Counter()
        for id_ in sequence_ids:
            table = self._tables[id_]
            for group, (layers, blocks) in enumerate(zip(self.groups, table.groups, strict=True)):
                first = 0 if layers.state_blocks else table.computed // layers.block_size
                written.update((group, block) for block in blocks[first:])
        return sum(count - 1 for count in written.values())

    def _grow(self, table: BlockTable, end: int, groups: Iterable[int]) -> None:
        for group in groups:
            layers, blocks = self.groups[group], table.groups[group]
            while not layers.state_blocks and len(blocks) < layers.blocks_for(end):
                blocks.append(self.moves.allocate())

    def extend(self, spans: Iterable[Span]) -> None:
        """Make spans of tokens writable: grow block tables, copy shared blocks.

        Blocks that no token from a span's start on attends to are released first. A published state
        is copied, or unpublished if there are no blocks for a copy.

        Raises:
            OutOfBlocksError: Not enough blocks are available for all spans.
            FileTakenError: A sequence must be spilled, and the file holds another one.
        """
        spans = list(spans)
        for span in spans:
            self._release_passed(span)
        writes = self._writes(spans)
        needed = blocks_to_write(self.groups, self.device, writes)
        if needed > self.device.num_available and self._keeps_states:
            self._unpublish_states(spans)
            writes = self._writes(spans)
            needed = blocks_to_write(self.groups, self.device, writes)
        self.device.require(needed)
        for table, span, shared in writes:
            # Other spans may have made copies meanwhile, so check again what is shared.
            entries = shared_entries(self.groups, self.device, table, span) if shared else ()
            for group, place in entries:
                self._copy_on_write(table, group, place, span.start)
            self._grow(table, span.end, range(len(self.groups)))
            table.num_tokens = max(table.num_tokens, span.end)
            table.computed = span.end

    def _writes(
        self, spans: Iterable[Span]
    ) -> list[tuple[BlockTable, Span, list[tuple[int, int]]]]:
        """Return each span with its block table and the shared entries that it writes."""
        tables = [self._tables[span.sequence_id] for span in spans]
        assert not any(table.swapped for table in tables)
        return [
            (table, span, shared_entries(self.groups, self.device, table, span))
            for table, span in zip(tables, spans, strict=True)
        ]

    def extend_in_place(self, sequence_id: int, position: int) -> bool:
        """Make one token writable as `extend` does, if that changes no block table.

        Most decode tokens change none.

        Args:
            sequence_id: The sequence; on the device.
            position: Position of the token.

        Returns:
            Whether it is writable now; if not, nothing has changed.
        """
        table, device = self._tables[sequence_id], self.device
        for layers, blocks, passed in zip(self.groups, table.groups, table.passed, strict=True):
            if layers.state_blocks:
                if any(device.references(b) > 1 or device.is_published(b) for b in blocks):
                    return False
                continue
            place = position // layers.block_size
            if place >= len(blocks) or device.references(blocks[place]) > 1:
                return False
            if layers.releases and layers.first_block(position) > passed:
                return False
        table.num_tokens = max(table.num_tokens, position + 1)
        table.computed = position + 1
        return True

    def append_blocks(
        self, tables: Iterable[BlockTable], positions: Iterable[int], *, spare: int
    ) -> bool:
        """Make one token of each of several sequences writable, if that takes only new blocks.

        Args:
            tables: The sequences' tables from `own_table`. The caller counts the tokens.
            positions: Positions of the tokens; each is the first of a block of some layer group.
            spare: Number of blocks that must stay available.

        Returns:
            Whether they are writable now; if not, nothing has changed.
        """
        grown: list[list[int]] = []
        for table, position in zip(tables, positions, strict=True):
            for layers, blocks in zip(self.groups, table.groups, strict=True):
                if position % layers.block_size == 0:
                    if position != len(blocks) * layers.block_size:
                        return False  # the block exists already: others may hold it too
                    grown.append(blocks)
        if len(grown) + spare > self.device.num_available:
            return False
        for blocks in grown:
            blocks.append(self.moves.allocate())
        return True

    def own_table(self, sequence_id: int, most_tokens: int) -> BlockTable | None:
        """Return a sequence's block table if writes within a block do not change it; else None.

        Once one token of a block is writable, the block's other tokens are too, until the sequence
        is forked, trimmed or swapped out. This does not hold with states, windows or spilled
        blocks. The caller that writes such tokens counts them in the table.

        Args:
            sequence_id: The sequence.
            most_tokens: Number of tokens that it may grow to.
        """
        if not self._grows_only or self.spilled.outgrows(most_tokens):
            return None
        return self._tables[sequence_id]

    def _copy_on_write(self, table: BlockTable, group: int, place: int, start: int) -> None:
        """Replace a shared block by a copy of the tokens before `start`, or of the state."""
        blocks, layers = table.groups[group], self.groups[group]
        shared, copy = blocks[place], self.moves.allocate()
        contents = bool(layers.state_blocks) or place * layers.block_size < start
        self.moves.copy_on_write(shared, copy, contents=contents)
        blocks[place] = copy

    def _release_passed(self, span: Span) -> None:
        """Release or spill the blocks before those that tokens from the span's start on read."""
        table = self._tables[span.sequence_id]
        for group, layers in enumerate(self.groups):
            if layers.bounded:
                blocks, first = table.groups[group], layers.first_block(span.start)
                for i in range(table.passed[group], first):
                    self.device.release(blocks[i])
                    blocks[i] = RELEASED
                table.passed[group] = max(first, table.passed[group])
            elif layers.kept is not None and layers.first_block(span.start) > table.passed[group]:
                self.spilled.spill(table, span)

    def _unpublish_states(self, spans: list[Span]) -> None:
        for span in spans:
            for group, layers in enumerate(self.groups):
                for block in self.table(span.sequence_id)[group] if layers.state_blocks else ():
                    self.device.unpublish(block)

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Share the blocks of a parent's first `num_tokens` tokens with a new sequence."""
        assert child_id not in self._tables
        assert parent_id != self.spilled.id
        parent = self._tables[parent_id]
        pool = self.swap if parent.swapped else self.device
        groups = [
            list(blocks) if layers.state_blocks else blocks[: layers.blocks_for(num_tokens)]
            for layers, blocks in zip(self.groups, parent.groups, strict=True)
        ]
        keys = parent.keys[: num_tokens // self.block_size]
        passed, swapped = list(parent.passed), parent.swapped
        child = BlockTable(
            groups, num_tokens, passed, num_tokens, salt=parent.salt, keys=keys, swapped=swapped
        )
        with ExitStack() as undo:
            for block in child.blocks():
                pool.share(block)
                undo.callback(pool.release, block)
            undo.pop_all()
        self._tables[child_id] = child

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Release the blocks after a sequence's first `num_tokens` tokens.

        A state cannot go back to fewer tokens, so its blocks stay.
        """
        table = self._tables[sequence_id]
        for layers, blocks in zip(self.groups, self.table(sequence_id), strict=True):
            while not layers.state_blocks and len(blocks) > layers.blocks_for(num_tokens):
                self.device.release(blocks.pop())
        table.num_tokens = min(table.num_tokens, num_tokens)

    def roll_back(self, sequence_id: int, num_tokens: int) -> None:
        """Forget the tokens computed after a sequence's first `num_tokens`: a rejected draft.

        Later tokens overwrite their slots. A state cannot be rolled back.
        """
        assert not any(layers.state_blocks for layers in self.groups)
        self.trim(sequence_id, num_tokens)
        self._tables[sequence_id].computed = num_tokens

    def free(self, sequence_id: int) -> None:
        """Release all blocks of a sequence, on the device or in swap space."""
        table = self._tables.pop(sequence_id)
        pool = self.swap if table.swapped else self.device
        for block in table.blocks():  # each group's last first: prefixes are evicted from the end
            pool.release(block)
        if sequence_id == self.spilled.id:
            self.spilled.id = None

    # Swap.

    def swap_out(self, sequence_ids: Iterable[int]) -> None:
        """Move sequences to swap space; blocks that they share stay shared there.

        Raises:
            OutOfBlocksError: Swap space does not have enough blocks.
        """
        self.moves.swap_out([self._tables[id_] for id_ in sequence_ids])

    def swap_in(self, sequence_ids: Iterable[int]) -> None:
        """Move sequences back to the device.

        Raises:
            OutOfBlocksError: The device does not have enough blocks.
        """
        self.moves.swap_in([self._tables[id_] for id_ in sequence_ids])

    def blocks_to_swap(self, sequence_ids: Iterable[int]) -> int:
        """Return the number of distinct blocks of sequences: the maximum that a swap copies."""
        return len({block for id_ in sequence_ids for block in self._tables[id_].blocks()})

    # Invariants.

    def check(self) -> None:
        """Assert the invariants of the pools and of every block table."""
        for table in self._tables.values():
            check_table(self.groups, table, self._step_tokens)
        for pool, in_swap in ((self.device, False), (self.swap, True)):
            tables = [table for table in self._tables.values() if table.swapped is in_swap]
            check_pool(pool, tables, self.moves.held(in_swap=in_swap))

    def check_idle(self) -> None:
        """Assert that no block is in use."""
        assert not self._tables, f"sequences left: {list(self._tables)[:8]}"
        assert self.device.num_in_use == 0
        assert self.swap.num_in_use == 0
        assert self.spilled.id is None
