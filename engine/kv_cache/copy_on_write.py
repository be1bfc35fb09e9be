"""Finds blocks that must be copied before writing, because others hold them too.

PagedAttention, section 4.4: outputs of one prompt share its blocks, the last of which is partly
filled. An output that writes there first gets its own copy of that block alone. The last one to
write needs no copy, as it is then the only holder.
"""

from collections import Counter
from collections.abc import Sequence

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.engine.kv_cache.block_pool import BlockPool
from octavo.engine.kv_cache.block_table import BlockTable, Span


def shared_entries(
    groups: Sequence[LayerGroup], device: BlockPool, table: BlockTable, span: Span
) -> list[tuple[int, int]]:
    """Return the entries that a span writes and that other holders or the prefix cache share.

    An entry is a layer group and a logical block. A published full block of K and V is never
    written again.
    """
    shared = []
    for group, layers in enumerate(groups):
        blocks = table.groups[group]
        if layers.state_blocks:
            if span.start:
                shared += [
                    (group, i)
                    for i, block in enumerate(blocks)
                    if device.references(block) > 1 or device.is_published(block)
                ]
            continue
        end = min(layers.blocks_for(span.end), len(blocks))
        for i in range(span.start // layers.block_size, end):
            if device.references(blocks[i]) > 1:
                shared.append((group, i))
    return shared


def blocks_to_write(
    groups: Sequence[LayerGroup],
    device: BlockPool,
    writes: Sequence[tuple[BlockTable, Span, list[tuple[int, int]]]],
) -> int:
    """Return the number of blocks that spans take; a shared block's last writer needs no copy.

    Every writer of a published state needs one.

    Args:
        groups: The model's layer groups.
        device: The device's blocks.
        writes: Each span with its block table and its `shared_entries`.
    """
    grown, written = 0, list[int]()
    for table, span, shared in writes:
        for layers, blocks in zip(groups, table.groups, strict=True):
            if not layers.state_blocks:
                grown += max(0, layers.blocks_for(span.end) - len(blocks))
        written += [table.groups[group][place] for group, place in shared]
    copies = 0
    for block, writers in Counter(written).items():
        holders = device.references(block)
        copies += min(writers, holders if device.is_published(block) else holders - 1)
    return grown + copies
