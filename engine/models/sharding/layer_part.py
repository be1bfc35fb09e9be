"""The inputs and outputs of a linear layer that a rank has, by their numbers in the whole layer."""

import numpy as np
from transformers import PreTrainedModel

from octavo.engine.models.linear.adapted_layers import LayerPart
from octavo.engine.models.sharding.plan import (
    COLUMNS,
    COLUMNS_TRANSPOSED,
    KEYS_VALUES,
    PACKED,
    ROWS,
    ROWS_TRANSPOSED,
    THREE_TRANSPOSED,
    VOCABULARY,
    ShardingPlan,
    count_heads,
)
from octavo.engine.parallel.world import World

GROUPS = {COLUMNS: 1, COLUMNS_TRANSPOSED: 1, PACKED: 2, THREE_TRANSPOSED: 3}
"""Number of layers that a layer of a style joins; each of them is split by outputs."""


def part_of(
    model: PreTrainedModel, path: str, sizes: tuple[int, int], plan: ShardingPlan, world: World
) -> LayerPart:
    """Return this rank's part of a linear layer.

    Args:
        model: The whole model; its weights are not read.
        path: The layer's name.
        sizes: The numbers of its inputs and outputs.
        plan: The division of the model.
        world: The ranks.
    """
    inputs, outputs = map(np.arange, sizes)
    style = plan.style_of(path)
    if style in {ROWS, ROWS_TRANSPOSED}:
        inputs = inputs.reshape(world.size, -1)[world.rank]
    elif style == VOCABULARY:
        first = world.start_of(len(outputs))
        outputs = outputs[first : first + world.part(len(outputs))]
    elif style == KEYS_VALUES:
        heads = count_heads(model, path, model.get_submodule(path)) or 1
        outputs = outputs.reshape(heads, -1)[world.rank * heads // world.size]
    elif style in GROUPS:
        outputs = outputs.reshape(GROUPS[style], world.size, -1)[:, world.rank].ravel()
    return LayerPart(inputs, outputs, sizes)
