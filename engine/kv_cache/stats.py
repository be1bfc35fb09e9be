"""Statistics of a KV cache, for the load."""

from collections.abc import Collection, Sequence

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.engine.kv_cache.block_table import BlockTable


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
