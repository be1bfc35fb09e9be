"""Moves of blocks from the device and back, ordered now and copied before the step.

PagedAttention, section 4.5: all blocks of a preempted sequence are swapped out together, as none of
its tokens can be computed without all of them. `--swap-space` sets the size.

Swap space holds preempted sequences. Its remaining blocks cache prefix blocks that the device
evicted (offloaded), which a later match copies back (restored). Preempted sequences evict these,
never the reverse: a dropped prefix may cost some prefill, a dropped sequence certainly costs its
own. Only prefixes that were hit are offloaded: a later sequence was admitted with them. Copying
blocks that are never reused would slow the steps for nothing. A prefix counts as hit until neither
memory has it.

Copies are done in the order of `Transfers`: all `swap_out` before all `swap_in` before all
`copies` and `spills`. So a device block may be swapped out and allocated again in the same step. A
block that is read in a step stays in use until its copy has been taken (`_reading`, `_copying`), so
that nothing overwrites it first.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from octavo.engine.kv_cache.block_pool import BlockPool
from octavo.engine.kv_cache.block_table import RELEASED, BlockTable
from octavo.engine.kv_cache.prefixes import PrefixCache
from octavo.engine.kv_cache.transfers import Transfers


class SwapMoves:
    """Orders the copies of blocks, and allocates the blocks that they need.

    Attributes:
        counters: Numbers of prefix blocks copied to swap space when evicted, and copied back, and
            of blocks spilled.
    """

    def __init__(self, device: BlockPool, swap: BlockPool, prefixes: PrefixCache) -> None:
        self._device = device
        self._swap = swap
        self._prefixes = prefixes
        self.counters = Counter(offloaded_blocks=0, restored_blocks=0, spilled_blocks=0)
        self._transfers = Transfers()
        self._offloading: dict[int, int] = {}  # swap block: the evicted device block copied there
        self._reading: list[int] = []  # swap blocks held until the copies from them are taken
        self._copying: list[int] = []  # device blocks held until the copies from them are taken

    def take_transfers(self) -> Transfers:
        """Return the copies ordered since the last call; the caller must do them."""
        while self._reading:
            self._swap.release(self._reading[-1])
            self._reading.pop()
        while self._copying:
            self._device.release(self._copying[-1])
            self._copying.pop()
        transfers, self._transfers = self._transfers, Transfers()
        transfers.swap_out += [(block, kept) for kept, block in self._offloading.items()]
        self.counters["offloaded_blocks"] += len(self._offloading)
        self._offloading.clear()
        return transfers

    def allocate(self) -> int:
        """Allocate a device block; a prefix block evicted for it is offloaded if it was hit."""
        if (evicted := self._device.next_evicted) is not None and self._device.was_hit(evicted[1]):
            block, key = evicted
            if (kept := self._swap.reserve_cached(key)) is not None:
                self._swap.mark_hit(key)
                self._offloading[kept] = block
        return self._device.allocate()

    @property
    def num_places(self) -> int:
        """Number of swap blocks that `place` can return."""
        return self._swap.num_available

    def place(self, key: bytes) -> int | None:
        """Cache a block in swap space, for the caller to fill; None if there is no need or room."""
        if self._device.find(key) is not None or (block := self._swap.reserve_cached(key)) is None:
            return None
        self._offloading.pop(block, None)  # cancel an offload there: it was just evicted
        return block

    def _allocate_in_swap(self, count: int) -> list[int]:
        """Allocate blocks of swap space, adjacent if possible, so that copies are few."""
        blocks = self._swap.allocate_together(count)
        for block in blocks:
            self._offloading.pop(block, None)  # cancel an offload there: it was just evicted
        return blocks

    def copy_on_write(self, shared: int, copy: int, *, contents: bool) -> None:
        """Give up a shared block for `copy`, which gets its contents if these are read."""
        if contents:
            self._transfers.copies.append((shared, copy))
        if self._device.references(shared) == 1:  # then only the prefix cache keeps it
            self._copying.append(shared)
        else:
            self._device.release(shared)

    def restore(self, kept: int, block: int, key: bytes) -> None:
        """Copy a prefix block back from swap space to a block of the device."""
        self._reading.append(kept)
        self._transfers.swap_in.append((kept, block))
        self._prefixes.publish_block(self._device, block, key)
        self.counters["restored_blocks"] += 1

    def spill(self, blocks: list[int], unit: int) -> None:
        """Give up a sequence's blocks, which are copied to a unit of the file."""
        self._transfers.spills.append((blocks, unit))
        self._copying += blocks
        self.counters["spilled_blocks"] += len(blocks)

    def swap_out(self, tables: Sequence[BlockTable]) -> None:
        """Move sequences to swap space; blocks that they share stay shared there.

        Raises:
            OutOfBlocksError: Swap space has not enough blocks.
        """
        self._transfers.swap_out += self._move(tables, self._device, self._swap)

    def swap_in(self, tables: Sequence[BlockTable]) -> None:
        """Move sequences back to the device.

        Raises:
            OutOfBlocksError: The device has not enough blocks.
        """
        moved = self._move(tables, self._swap, self._device)
        self._reading += [block for block, _ in moved]
        self._transfers.swap_in += moved

    def _move(
        self, tables: Sequence[BlockTable], source: BlockPool, target: BlockPool
    ) -> list[tuple[int, int]]:
        """Move sequences' blocks from one pool to the other.

        Returns:
            The copies to do; blocks whose contents `target` already has need none.
        """
        assert all(table.swapped is (source is self._swap) for table in tables)
        holders = Counter(block for table in tables for block in table.blocks())
        moved = {
            block: there
            for table in tables
            for block, key in self._prefixes.full_blocks(table)
            if (there := target.find(key)) is not None
        }
        copied = [block for block in holders if block not in moved]
        idle = sum(target.is_idle(block) for block in set(moved.values()))
        target.require(len(copied) + idle)
        with ExitStack() as undo:
            # Share published blocks before allocating any, as allocation may evict them.
            for there in moved.values():
                target.share(there)
                undo.callback(target.release, there)
            if target is self._swap:
                moved.update(zip(copied, self._allocate_in_swap(len(copied)), strict=True))
                for block in copied:
                    undo.callback(target.release, moved[block])
            else:
                for block in copied:
                    moved[block] = self.allocate()
                    undo.callback(target.release, moved[block])
                    source.share(block)  # for `_reading`
                    undo.callback(source.release, block)
            for block, count in holders.items():
                for _ in range(count - 1):
                    target.share(moved[block])
                    undo.callback(target.release, moved[block])
            # A pool evicts blocks in the order of release: so each table's last block goes first,
            # and a prefix keeps its front, which a later match needs without gaps.
            for table in tables:
                for block in table.blocks():
                    source.release(block)
                    undo.callback(source.undo_release, block)
            undo.pop_all()
        for table in tables:
            for group, blocks in enumerate(table.groups):
                table.groups[group] = [
                    moved[block] if block != RELEASED else RELEASED for block in blocks
                ]
            table.swapped = target is self._swap
            for block, key in self._prefixes.full_blocks(table):
                self._prefixes.publish_block(target, block, key)
        return [(block, moved[block]) for block in copied]

    def held(self, *, in_swap: bool) -> list[int]:
        """Return the blocks that are in use until copies from them are taken."""
        return self._reading if in_swap else self._copying
