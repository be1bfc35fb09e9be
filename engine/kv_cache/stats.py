"""Statistics of a KV cache, for metrics and the load."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.engine.kv_cache.block_table import BlockTable


@dataclass(slots=True)
class CacheCounters:
    """Events since the start, for metrics and tests.

    Attributes:
        offloaded_blocks: Prefix blocks copied to swap space when evicted.
        restored_blocks: Prefix blocks copied back instead of recomputed.
    """

    offloaded_blocks: int = 0
    restored_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Numbers of blocks by state, at one moment.

    Attributes:
        total_blocks: Number of device blocks.
        free_blocks: Device blocks that hold nothing.
        cached_blocks: Device blocks that only the prefix cache keeps.
        shared_blocks: Device blocks that several block-table entries hold.
        wasted_slots: Unused token slots in device blocks that sequences hold, in blocks of the
            smallest size.
        total_swap_blocks: Number of blocks in CPU swap space.
        used_swap_blocks: Swap blocks that preempted sequences hold.
        cached_swap_blocks: Swap blocks that only the prefix cache keeps.
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


def wasted_slots(groups: Sequence[LayerGroup], tables: Collection[BlockTable]) -> int:
    """Return the unused slots in device blocks, counted in blocks of the smallest size.

    Only a table's last block can have unused slots. Of sequences that share it, the longest counts.
    """
    wasted, smallest = 0, min(layers.block_size for layers in groups)
    for group, layers in enumerate(groups):
        if layers.state_blocks:
            continue
        size = layers.block_size
        filled: dict[int, int] = {}
        for table in tables:
            blocks = table.groups[group]
            if len(blocks) > table.passed[group] and not table.swapped:
                tokens = min(table.num_tokens - (len(blocks) - 1) * size, size)
                filled[blocks[-1]] = max(tokens, filled.get(blocks[-1], 0))
        slots = len(filled) * size - sum(filled.values())
        wasted += slots * smallest // size
    return wasted
