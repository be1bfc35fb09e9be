"""Conversion of layer groups to and from protobuf."""

from octavo.common.kv_cache.layer_groups import BlockBudget, LayerGroup
from octavo.v1 import engine_pb2


def to_message(group: LayerGroup) -> engine_pb2.LayerGroup:
    """Return a layer group as a protobuf message."""
    return engine_pb2.LayerGroup(
        block_size=group.block_size,
        window=group.window,
        chunk=group.chunk,
        state_blocks=group.state_blocks,
        kept=group.kept,
    )


def to_budget(info: engine_pb2.GetEngineInfoResponse, total_blocks: int) -> BlockBudget:
    """Return an engine's block budget; without named groups, it has a single one."""
    groups = [
        LayerGroup(
            group.block_size,
            group.window if group.HasField("window") else None,
            group.chunk if group.HasField("chunk") else None,
            group.state_blocks,
            group.kept if group.HasField("kept") else None,
        )
        for group in info.layer_groups
    ]
    groups = groups or [LayerGroup(info.block_size)]
    return BlockBudget(total_blocks, tuple(groups), info.max_num_batched_tokens)
