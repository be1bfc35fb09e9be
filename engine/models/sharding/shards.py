"""Finds a rank's shards of weights and of linear layers, by the plan."""

from dataclasses import replace

import torch
from torch import nn

from octavo.engine.models.linear.adapted_layers import LayerPart
from octavo.engine.models.shard import Shard
from octavo.engine.models.sharding.plan import (
    COLUMNS,
    COLUMNS_TRANSPOSED,
    KEYS_VALUES,
    PACKED,
    PACKED_TRANSPOSED,
    ROWS,
    ROWS_TRANSPOSED,
    THREE_TRANSPOSED,
    VOCABULARY,
    WHOLE_EXPERTS,
    ShardingPlan,
    count_heads,
)
from octavo.engine.parallel.world import World

BY_INPUTS = {ROWS, ROWS_TRANSPOSED}
"""Styles of layers that are split by inputs: their outputs are sums over ranks."""
DIMS = {
    **dict.fromkeys((COLUMNS, KEYS_VALUES, PACKED, ROWS_TRANSPOSED, VOCABULARY), -2),
    **dict.fromkeys((ROWS, COLUMNS_TRANSPOSED, PACKED_TRANSPOSED, THREE_TRANSPOSED), -1),
    WHOLE_EXPERTS: -3,
}
"""The dimension along which a style splits a weight."""
GROUPS = {PACKED: 2, PACKED_TRANSPOSED: 2, THREE_TRANSPOSED: 3}
"""Number of layers that a layer of a style joins; each of them is split."""


def find_shards(model: nn.Module, plan: ShardingPlan, world: World) -> dict[tuple[str, str], Shard]:
    """Return this rank's shards of parameters, by the names of module and parameter.

    Args:
        model: The whole model; its weights are not read.
        plan: The division of the model.
        world: The ranks; each holds all other parameters whole.
    """
    shards: dict[tuple[str, str], Shard] = {}
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(recurse=False):
            style = plan.style_of(f"{path}.{name}") or plan.style_of(path)
            if style in DIMS and not (name == "bias" and style in BY_INPUTS):
                dim = max(DIMS[style], -weight.dim())
                shard = _shard(model, path, style, weight.shape[dim], world)
                shards[path, name] = replace(shard, dim=dim)
    return shards


def part_of(
    model: nn.Module, path: str, sizes: tuple[int, int], plan: ShardingPlan, world: World
) -> LayerPart:
    """Return this rank's part of a linear layer.

    Args:
        model: The whole model; its weights are not read.
        path: The layer's name.
        sizes: The numbers of its inputs and outputs.
        plan: The division of the model.
        world: The ranks.
    """
    inputs, outputs = map(torch.arange, sizes)
    style = plan.style_of(path)
    if style in BY_INPUTS:
        inputs = _shard(model, path, style, len(inputs), world).take(inputs)
    elif style in DIMS:
        outputs = _shard(model, path, style, len(outputs), world).take(outputs)
    return LayerPart(inputs.numpy(), outputs.numpy(), sizes)


def _shard(model: nn.Module, path: str, style: str, count: int, world: World) -> Shard:
    """Return this rank's shard of `count` inputs or outputs."""
    if style == VOCABULARY:
        start = world.start_of(count)
        return Shard(-1, 1, start, min(world.part(count), count - start))
    if style == KEYS_VALUES:
        heads = count_heads(model, path, model.get_submodule(path)) or 1
        width = count // heads
        return Shard(-1, 1, world.rank * heads // world.size * width, width)
    groups = GROUPS.get(style, 1)
    width = count // groups // world.size
    return Shard(-1, groups, world.rank * width, width)
