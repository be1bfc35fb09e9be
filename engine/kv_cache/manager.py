"""The manager of the paged KV cache: block tables, sharing, swap, prefixes.

Blocks are mapped to sequences by block tables, as in "Efficient Memory Management for Large
Language Model Serving with PagedAttention" (Kwon et al., SOSP 2023, section 4). Each group of
layers has a table of its own for each sequence (`octavo.common.layer_groups`), and all take their
blocks from one pool. A method that raises changes nothing, except that blocks that fell out of a
window stay released.

Swap space has two uses. It holds preempted sequences. The rest of it caches prefix
blocks that the device evicted (offloaded), which a later match copies back (restored).
A preempted sequence evicts these, never the reverse. Only a prefix that was hit is
offloaded: one that a sequence was admitted with since it was computed. Copying what is
read only once would slow the steps for nothing. A prefix counts as hit until neither
memory has it.

A state is overwritten in each step. To keep it for the prefix cache, its blocks are published like
full blocks of K and V, and the next step's writer gets a copy (`extend`). Which states are kept is
as in Marconi (Pan et al., MLSys 2025): at the end of a prompt, where prompts that
have a beginning in common part, and the latest of a decode.

Copies are ordered at once and done before the step computes, all `swap_out`
before all `swap_in` before all `copies`. So a device block may be swapped out and
allocated again in the same step. A block that is read in a step stays in use until
its copy has been taken (`_reading`, `_copying`), so that nothing overwrites it first.
Sequences that got blocks in a step keep them until its copies are taken.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Tokens
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.common.layer_groups import LayerGroup, blocks_held
from octavo.common.prefix import chain_keys, root_key
from octavo.engine.kv_cache.block_pool import BlockPool, OutOfBlocksError
from octavo.engine.kv_cache.block_table import RELEASED, BlockTable
from octavo.engine.kv_cache.prefixes import Hit, Prefix, PrefixFinder, block_keys, is_shared_key
from octavo.engine.kv_cache.transfers import Transfers


class Span(NamedTuple):
    """Tokens [start, end) of a sequence."""

    sequence_id: int
    start: int
    end: int


class Entry(NamedTuple):
    """An entry of a block table: logical block `place` of layer group `group`."""

    group: int
    place: int


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
            hold, that no token has been given; in blocks of the smallest size.
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
        self,
        *,
        num_blocks: int,
        groups: Iterable[LayerGroup],
        num_swap_blocks: int,
        prefix_caching: bool,
        step_tokens: int,
    ) -> None:
        """Make an empty cache.

        Args:
            num_blocks: on the device.
            groups: the model's layer groups.
            num_swap_blocks: in swap space.
            prefix_caching: whether requests with a common prefix share its blocks.
            step_tokens: the most tokens of a sequence that a step computes.
        """
        self.groups = tuple(groups)
        self.block_size = min(group.block_size for group in self.groups)
        self.prefix_caching = prefix_caching
        self.device = BlockPool(num_blocks)
        self.swap = BlockPool(num_swap_blocks)
        self._step_tokens = step_tokens
        self._finder = PrefixFinder(self.groups, self.device, self.swap)
        self._keeps_states = prefix_caching and any(group.state_blocks for group in self.groups)
        self._grows_only = not any(g.state_blocks or g.bounded for g in self.groups)
        self._tables: dict[int, BlockTable] = {}
        self.counters = CacheCounters()
        self._transfers = Transfers()
        self._offloading: dict[int, int] = {}  # swap block: the evicted device block copied there
        self.published: set[bytes] = set()
        self._reading: list[int] = []  # swap blocks held until the copies from them are taken
        self._copying: list[int] = []  # device blocks, likewise

    # State.

    def blocks_for(self, num_tokens: int) -> int:
        """Return the most blocks that a sequence of `num_tokens` tokens holds at any time."""
        return blocks_held(self.groups, num_tokens, self._step_tokens)

    def table(self, sequence_id: int) -> list[list[int]]:
        """Return each layer group's device blocks of a sequence; do not change them."""
        table = self._tables[sequence_id]
        assert not table.swapped, f"sequence {sequence_id} is swapped out"
        return table.groups

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
        if self._grows_only and not self.device.num_shared:
            tables = self._tables.values()
            ends = np.array([table.num_tokens for table in tables if not table.swapped], np.int64)
            return sum(
                int((-ends % group.block_size * self.block_size // group.block_size).sum())
                for group in self.groups
            )
        wasted = 0
        for group, layers in enumerate(self.groups):
            if layers.state_blocks:
                continue
            size = layers.block_size
            filled: dict[int, int] = {}
            for table in self._tables.values():
                blocks = table.groups[group]
                if len(blocks) > table.passed[group] and not table.swapped:
                    tokens = min(table.num_tokens - (len(blocks) - 1) * size, size)
                    filled[blocks[-1]] = max(tokens, filled.get(blocks[-1], 0))
            slots = len(filled) * size - sum(filled.values())
            wasted += slots * self.block_size // size
        return wasted

    def take_transfers(self) -> Transfers:
        """Return the copies ordered since the last call; the caller must do them."""
        while self._reading:
            self.swap.release(self._reading[-1])
            self._reading.pop()
        while self._copying:
            self.device.release(self._copying[-1])
            self._copying.pop()
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

    def find_prefix(self, token_ids: Tokens[int], salt: str = "") -> Prefix:
        """Return the blocks that already hold the front of `token_ids`.

        The last token is never among them: its logits must be computed.
        """
        return self._finder.find(token_ids, salt) if self.prefix_caching else self._finder.nothing

    def publish(self, sequence_id: int, token_ids: Tokens[int], num_computed: int) -> None:
        """Make a sequence's full, computed blocks findable by other requests.

        Its state is published too, if it is of `num_computed` tokens and these fill all blocks.

        Args:
            sequence_id: the sequence; on the device.
            token_ids: its tokens.
            num_computed: how many of them, from the front, have K/V.
        """
        if not self.prefix_caching:
            return
        table, size = self._tables[sequence_id], self.block_size
        keys = table.keys
        before, count = len(keys), num_computed // size
        if count <= before:
            return
        parent = keys[-1] if keys else table.root
        keys += chain_keys(parent, token_ids[before * size : count * size], size)
        for group, layers in enumerate(self.groups):
            ratio, blocks = layers.block_size // size, table.groups[group]
            if layers.state_blocks:
                continue
            first, end = max(before // ratio, table.passed[group]), count // ratio
            names = keys[(first + 1) * ratio - 1 : end * ratio : ratio]
            for block, name in zip(blocks[first:end], names, strict=True):
                (key,) = block_keys(name, group)
                self._publish(self.device, block, key)
        if self._keeps_states and num_computed == table.computed:
            self._publish_state(table, len(token_ids))

    def _publish_state(self, table: BlockTable, num_tokens: int) -> None:
        """Publish the state, if it stands for full blocks; a decode's replaces its last one."""
        if table.computed % self._finder.stride:
            return
        key = table.keys[table.computed // self.block_size - 1]
        decoding = table.computed >= num_tokens
        if decoding:
            for old in table.snapshot:
                if not self.device.was_hit(old):
                    self.device.forget(old)
            table.snapshot = []
        for group, layers in enumerate(self.groups):
            if layers.state_blocks:
                names = block_keys(key, group, layers.state_blocks)
                for block, name in zip(table.groups[group], names, strict=True):
                    self._publish(self.device, block, name)
                table.snapshot += names if decoding else []

    def pause_before(self, sequence_id: int, start: int, end: int) -> int:
        """Return where a prefill of tokens [start, end) is to end, so that a state can be kept.

        That is where it can be found again: at the last whole blocks before the end of the prompt,
        and where another prompt with the same beginning went another way.
        """
        if not self._keeps_states:
            return end
        branch, stride = self._tables[sequence_id].branch, self._finder.stride
        if start < branch < end:
            return branch
        whole = (end - 1) // stride * stride
        return whole if whole > start else end

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
        changed = set(filter(is_shared_key, changed))
        held = self.device.held_of(changed) | self.swap.held_of(changed)
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
        prefix = self.find_prefix(token_ids, salt) if reuse else self._finder.nothing
        self._require(self.device, self._blocks_beside(prefix, len(token_ids)))
        table = BlockTable([], len(token_ids), [], root=root_key(salt), keys=list(prefix.keys))
        table.branch = prefix.reach if prefix.reach > prefix.num_tokens else 0
        table.computed = prefix.num_tokens
        restored: list[tuple[Hit, int]] = []
        taken: list[int] = []
        with ExitStack() as undo:
            for hit in prefix.hits():  # all of them before anything is evicted
                pool = self.swap if hit.swapped else self.device
                pool.share(hit.block)
                undo.callback(pool.release, hit.block)
            undo.callback(self._release, taken)
            for group, hits in enumerate(prefix.groups):
                first, end = self._reserved(group, prefix.num_tokens, len(token_ids))
                table.passed.append(first)
                blocks = [RELEASED] * first
                table.groups.append(blocks)
                for i in range(end - first):
                    known = hits[i] if i < len(hits) else None
                    if known is not None and not known.swapped:
                        blocks.append(known.block)
                        continue
                    block = self._allocate()
                    blocks.append(block)
                    taken.append(block)
                    if known is not None:
                        restored.append((known, block))
            undo.pop_all()
        self._tables[sequence_id] = table
        for hit, block in restored:
            self._reading.append(hit.block)
            self._transfers.swap_in.append((hit.block, block))
            self._publish(self.device, block, hit.key)
            self.counters.restored_blocks += 1
        for hit in prefix.hits():
            self.device.mark_hit(hit.key)
            self.swap.mark_hit(hit.key)
        return prefix.num_tokens

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.device.release(block)

    def blocks_to_admit(self, token_ids: Tokens[int], *, reuse: bool = True, salt: str = "") -> int:
        """Return how many of the available blocks `admit` would take."""
        prefix = self.find_prefix(token_ids, salt) if reuse else self._finder.nothing
        return self._blocks_beside(prefix, len(token_ids))

    def _reserved(self, group: int, num_cached: int, num_tokens: int) -> tuple[int, int]:
        """Return the first block that a new sequence needs, and the end of those it gets at once.

        Groups whose blocks are released get those of the first step only.
        """
        layers = self.groups[group]
        if layers.state_blocks:
            return 0, layers.state_blocks
        if layers.bounded:
            num_tokens = min(num_tokens, num_cached + self._step_tokens)
        return layers.first_block(num_cached), layers.blocks_for(num_tokens)

    def _blocks_beside(self, prefix: Prefix, num_tokens: int) -> int:
        """Return how many available blocks `num_tokens` tokens take, those in use not counted."""
        held = sum(not hit.swapped and not self.device.is_idle(hit.block) for hit in prefix.hits())
        spans = (
            self._reserved(group, prefix.num_tokens, num_tokens)
            for group in range(len(self.groups))
        )
        return sum(end - first for first, end in spans) - held

    def reserve(self, sequence_id: int, end: int) -> None:
        """Grow the tables of unbounded groups to `end` tokens, so that a prefill keeps its room.

        Raises:
            OutOfBlocksError: not enough blocks are available.
        """
        self._require(self.device, self.blocks_to_reserve(sequence_id, end))
        table = self._tables[sequence_id]
        self._grow(table, end, (g for g, layers in enumerate(self.groups) if not layers.bounded))
        table.num_tokens = max(table.num_tokens, end)

    def blocks_to_reserve(self, sequence_id: int, end: int) -> int:
        """Return how many blocks `reserve` takes, and the first step of bounded groups after it.

        The sequence may be swapped out.
        """
        table, needed = self._tables[sequence_id], 0
        for layers, blocks in zip(self.groups, table.groups, strict=True):
            if not layers.state_blocks:
                least = min(end, table.computed + self._step_tokens) if layers.bounded else end
                needed += max(0, layers.blocks_for(least) - len(blocks))
        return needed

    def blocks_to_share(self, sequence_ids: Iterable[int]) -> int:
        """Return how many copies it takes that no two of some sequences write the same block.

        They write their states, and the blocks of their next tokens. They may be swapped out.
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
                blocks.append(self._allocate())

    def extend(self, spans: Iterable[Span]) -> None:
        """Make spans of tokens writable: grow block tables, copy shared blocks.

        Blocks that no token from a span's start on attends to are released first. A state that is
        published is copied, or is unpublished if there are no blocks for a copy.

        Raises:
            OutOfBlocksError: not enough blocks are available for all of them.
        """
        spans = list(spans)
        for span in spans:
            self._release_passed(span)
        writes = [(span, self._shared(span)) for span in spans]
        needed = self._blocks_to_extend(writes)
        if needed > self.device.num_available and self._keeps_states:
            self._unpublish_states(spans)
            writes = [(span, self._shared(span)) for span in spans]
            needed = self._blocks_to_extend(writes)
        self._require(self.device, needed)
        for span, shared in writes:
            table = self._tables[span.sequence_id]
            for entry in self._shared(span) if shared else ():  # others may have copied theirs
                self._copy_on_write(table, entry, span.start)
            self._grow(table, span.end, range(len(self.groups)))
            table.num_tokens = max(table.num_tokens, span.end)
            table.computed = span.end

    def extend_in_place(self, sequence_id: int, position: int) -> bool:
        """Make one token writable as `extend` does, if that changes no block table.

        Most tokens of a decode do not.

        Args:
            sequence_id: the sequence; on the device.
            position: of the token.

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
            if layers.bounded and layers.first_block(position) > passed:
                return False
        table.num_tokens = max(table.num_tokens, position + 1)
        table.computed = position + 1
        return True

    def append_blocks(
        self, tables: Iterable[BlockTable], positions: Iterable[int], *, spare: int
    ) -> bool:
        """Make one token of each of several sequences writable, if that takes only new blocks.

        Args:
            tables: of the sequences, as `own_table` gave them. The caller counts the tokens.
            positions: of the tokens; each is the first of a block of some layer group.
            spare: how many blocks must be available after that.

        Returns:
            Whether they are writable now; if not, nothing has changed.
        """
        grown: list[list[int]] = []
        for table, position in zip(tables, positions, strict=True):
            for layers, blocks in zip(self.groups, table.groups, strict=True):
                if position % layers.block_size == 0:
                    if position != len(blocks) * layers.block_size:
                        return False  # the block is there already: others may hold it too
                    grown.append(blocks)
        if len(grown) + spare > self.device.num_available:
            return False
        for blocks in grown:
            blocks.append(self._allocate())
        return True

    def own_table(self, sequence_id: int) -> BlockTable | None:
        """Return a sequence's block table if its writes within a block change none; else None.

        Once a token of a block was made writable, the block's other tokens are too, until the
        sequence is forked, trimmed or swapped out. This holds unless states are kept or blocks
        fall out of a window. Whoever writes such tokens counts them in the table.
        """
        return self._tables[sequence_id] if self._grows_only else None

    def _copy_on_write(self, table: BlockTable, entry: Entry, start: int) -> None:
        """Replace a shared block by a copy of the tokens before `start`, or of the state."""
        blocks, layers = table.groups[entry.group], self.groups[entry.group]
        shared, copy = blocks[entry.place], self._allocate()
        if layers.state_blocks or entry.place * layers.block_size < start:
            self._transfers.copies.append((shared, copy))
        if self.device.references(shared) == 1:  # only the prefix cache keeps it then
            self._copying.append(shared)
        else:
            self.device.release(shared)
        blocks[entry.place] = copy

    def _release_passed(self, span: Span) -> None:
        """Release the blocks that no token from the span's start on attends to."""
        table = self._tables[span.sequence_id]
        for group, layers in enumerate(self.groups):
            if layers.bounded:
                blocks, first = table.groups[group], layers.first_block(span.start)
                for i in range(table.passed[group], first):
                    self.device.release(blocks[i])
                    blocks[i] = RELEASED
                table.passed[group] = max(first, table.passed[group])

    def _unpublish_states(self, spans: list[Span]) -> None:
        for span in spans:
            for group, layers in enumerate(self.groups):
                for block in self.table(span.sequence_id)[group] if layers.state_blocks else ():
                    self.device.unpublish(block)

    def _blocks_to_extend(self, writes: list[tuple[Span, list[Entry]]]) -> int:
        """Return how many blocks spans take; the last writer of a shared block need not copy it.

        Of a published state, every writer must.
        """
        grown, written = 0, list[int]()
        for span, shared in writes:
            tables = self.table(span.sequence_id)
            for layers, blocks in zip(self.groups, tables, strict=True):
                if not layers.state_blocks:
                    grown += max(0, layers.blocks_for(span.end) - len(blocks))
            written += [tables[group][place] for group, place in shared]
        if not written:
            return grown
        writers = Counter(written).items()
        return grown + sum(min(n, self._holders_to_leave(block)) for block, n in writers)

    def _holders_to_leave(self, block: int) -> int:
        """Return how many holders of a block must take a copy before it can be written."""
        references = self.device.references(block)
        return references if self.device.is_published(block) else references - 1

    def _shared(self, span: Span) -> list[Entry]:
        """Return the entries that a span writes and that others hold too, or the prefix cache.

        A full block of K and V that is published is never written again.
        """
        shared = []
        device, tables = self.device, self.table(span.sequence_id)
        for group, layers in enumerate(self.groups):
            blocks = tables[group]
            if layers.state_blocks:
                if span.start:
                    shared += [
                        Entry(group, i)
                        for i, block in enumerate(blocks)
                        if device.references(block) > 1 or device.is_published(block)
                    ]
                continue
            end = min(layers.blocks_for(span.end), len(blocks))
            for i in range(span.start // layers.block_size, end):
                if device.references(blocks[i]) > 1:
                    shared.append(Entry(group, i))
        return shared

    def fork(self, parent_id: int, child_id: int, num_tokens: int) -> None:
        """Share a parent's first `num_tokens` tokens with a new sequence, in the same memory."""
        assert child_id not in self._tables
        parent = self._tables[parent_id]
        pool = self.swap if parent.swapped else self.device
        groups = [
            list(blocks) if layers.state_blocks else blocks[: layers.blocks_for(num_tokens)]
            for layers, blocks in zip(self.groups, parent.groups, strict=True)
        ]
        keys = parent.keys[: num_tokens // self.block_size]
        child = BlockTable(
            groups,
            num_tokens,
            list(parent.passed),
            num_tokens,
            root=parent.root,
            keys=keys,
            swapped=parent.swapped,
        )
        with ExitStack() as undo:
            for block in child.blocks():
                pool.share(block)
                undo.callback(pool.release, block)
            undo.pop_all()
        self._tables[child_id] = child

    def trim(self, sequence_id: int, num_tokens: int) -> None:
        """Release the blocks after a sequence's first `num_tokens` tokens.

        A state is not of fewer tokens than it was computed for, so these stay.
        """
        table = self._tables[sequence_id]
        for layers, blocks in zip(self.groups, self.table(sequence_id), strict=True):
            while not layers.state_blocks and len(blocks) > layers.blocks_for(num_tokens):
                self.device.release(blocks.pop())
        table.num_tokens = min(table.num_tokens, num_tokens)

    def roll_back(self, sequence_id: int, num_tokens: int) -> None:
        """Forget what was computed after a sequence's first `num_tokens` tokens: a rejected draft.

        What their blocks hold is overwritten. A state cannot be rolled back.
        """
        assert not any(layers.state_blocks for layers in self.groups)
        self.trim(sequence_id, num_tokens)
        self._tables[sequence_id].computed = num_tokens

    def free(self, sequence_id: int) -> None:
        """Release all blocks of a sequence, on the device or in swap space."""
        table = self._tables.pop(sequence_id)
        pool = self.swap if table.swapped else self.device
        for block in table.blocks():  # each group's last first: a prefix is evicted from its end
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
        return len({block for id_ in sequence_ids for block in self._tables[id_].blocks()})

    def _move(
        self, sequence_ids: Iterable[int], source: BlockPool, target: BlockPool
    ) -> list[tuple[int, int]]:
        """Move sequences' blocks from one pool to the other.

        Returns:
            The copies to do; blocks whose contents `target` has already need none.
        """
        tables = [self._tables[id_] for id_ in sequence_ids]
        assert all(table.swapped is (source is self.swap) for table in tables)
        holders = Counter(block for table in tables for block in table.blocks())
        moved = {
            block: there
            for table in tables
            for block, key in self._published_blocks(table)
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
                for block in table.blocks():  # so that a prefix is evicted from its end
                    source.release(block)
                    undo.callback(source.undo_release, block)
            undo.pop_all()
        for table in tables:
            for group, blocks in enumerate(table.groups):
                table.groups[group] = [
                    moved[block] if block != RELEASED else RELEASED for block in blocks
                ]
            table.swapped = target is self.swap
            for block, key in self._published_blocks(table):
                self._publish(target, block, key)
        return [(block, moved[block]) for block in copied]

    def _published_blocks(self, table: BlockTable) -> Iterator[tuple[int, bytes]]:
        """Yield the full blocks of K and V that a table holds, with their keys."""
        for group, layers in enumerate(self.groups):
            ratio, blocks = layers.block_size // self.block_size, table.groups[group]
            if not layers.state_blocks:
                for i in range(table.passed[group], min(len(table.keys) // ratio, len(blocks))):
                    yield blocks[i], block_keys(table.keys[(i + 1) * ratio - 1], group)[0]

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
                self._check_table(table)
                if table.swapped is swapped:
                    for block in table.blocks():
                        held[block] += 1
            for block in self._reading if swapped else self._copying:
                held[block] += 1
            assert held == list(map(pool.references, range(pool.num_blocks))), (
                "a reference count is not the number of block-table entries"
            )

    def _check_table(self, table: BlockTable) -> None:
        for group, layers in enumerate(self.groups):
            blocks, passed = table.groups[group], table.passed[group]
            assert blocks[:passed] == [RELEASED] * passed
            assert RELEASED not in blocks[passed:], "a block was released that is still read"
            if layers.state_blocks:
                assert len(blocks) == layers.state_blocks
            elif layers.bounded:
                assert len(blocks) <= layers.blocks_for(table.num_tokens)
                most = layers.held(table.num_tokens, self._step_tokens)
                assert len(blocks) - passed <= most, "a table holds more than its bound"
            else:
                assert len(blocks) == layers.blocks_for(table.num_tokens), (
                    "a table has more blocks than its tokens need"
                )

    def check_idle(self) -> None:
        """Assert that no block is in use."""
        assert not self._tables, f"sequences left: {list(self._tables)[:8]}"
        assert self.device.num_in_use == 0
        assert self.swap.num_in_use == 0
