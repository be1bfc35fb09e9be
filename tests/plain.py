"""Models with one layer group, in which every token attends to all earlier tokens."""

from octavo.common.kv_cache.layer_groups import BlockBudget, LayerGroup
from octavo.engine.model_shape import LayerShape, ModelShape


def budget(total_blocks: int, block_size: int) -> BlockBudget:
    """Number of an engine's blocks."""
    return BlockBudget(total_blocks, (LayerGroup(block_size),), 2048)


def shape(
    layers: int, heads: int, kv_heads: int, head_dim: int, vocab_size: int, max_position: int
) -> ModelShape:
    """A model's dimensions."""
    layer = LayerShape(heads, kv_heads, head_dim, head_dim)
    return ModelShape((layer,) * layers, vocab_size, max_position, (0,))
