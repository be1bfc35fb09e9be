"""Invariants of the pools and of every block table, which tests check after each operation."""

from collections.abc import Iterable, Sequence

from octavo.common.kv_cache.layer_groups import LayerGroup
from octavo.engine.kv_cache.block_pool import BlockPool
from octavo.engine.kv_cache.block_table import RELEASED, BlockTable


def check_pool(pool: BlockPool, tables: Iterable[BlockTable], held: Iterable[int]) -> None:
    """Assert that each block's reference count is the number of entries that hold it.

    Args:
        pool: The blocks.
        tables: The block tables in this pool.
        held: Blocks in use until copies from them are taken.
    """
    pool.check()
    counts = [0] * pool.num_blocks
    for block in (*(block for table in tables for block in table.blocks()), *held):
        counts[block] += 1
    assert counts == list(map(pool.references, range(pool.num_blocks))), (
        "a reference count is not the number of block-table entries"
    )


def check_table(groups: Sequence[LayerGroup], table: BlockTable, step_tokens: int) -> None:
    """Assert that a table has exactly the blocks that its tokens need.

    Args:
        groups: The model's layer groups.
        table: The table.
        step_tokens: Maximum number of tokens of a sequence in a step.
    """
    for group, layers in enumerate(groups):
        blocks, passed = table.groups[group], table.passed[group]
        assert blocks[:passed] == [RELEASED] * passed
        assert RELEASED not in blocks[passed:], "a block was released that is still read"
        if layers.state_blocks:
            assert len(blocks) == layers.state_blocks
        elif layers.bounded:
            assert len(blocks) <= layers.blocks_for(table.num_tokens)
            most = layers.held(table.num_tokens, step_tokens)
            assert len(blocks) - passed <= most, "a table holds more than its bound"
        else:
            assert len(blocks) == layers.blocks_for(table.num_tokens), (
                "a table has more blocks than its tokens need"
            )
        if layers.kept is not None:
            assert passed * layers.block_size % layers.unit == 0
            most = layers.held(table.num_tokens, step_tokens)
            assert len(blocks) - passed <= most, "a table holds more than it keeps"
