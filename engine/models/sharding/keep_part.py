"""Shards a model for this rank (tensor parallelism).

The model's large weights are still in their files (see `deferred.py`), so a rank reads only its
shards. transformers' own tensor parallelism is not used: the layers of `sharded_layers.py` can be
packed, quantized and compiled like any others.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.engine.models.deferred import take
from octavo.engine.models.experts.expert_layer import SHARDS
from octavo.engine.models.sharding.plan import EXPERTS, VOCABULARY, ShardingPlan
from octavo.engine.models.sharding.sharded_layers import (
    SummedLinear,
    VocabularyEmbedding,
    sum_experts,
    sum_whole_experts,
)
from octavo.engine.models.sharding.shards import BY_INPUTS, find_shards
from octavo.engine.parallel.world import World


@torch.no_grad()
def keep_part(model: PreTrainedModel, plan: ShardingPlan, world: World) -> None:
    """Shard a model for this rank, and add all-reduces where ranks compute partial sums.

    Args:
        model: The whole model; changed in place.
        plan: The division of the model.
        world: The ranks.
    """
    _take_parts(model, plan, world)
    _set_sizes(model, plan)
    _add_up(model, plan, world)


def _take_parts(model: nn.Module, plan: ShardingPlan, world: World) -> None:
    """Replace each weight by this rank's shard; tied weights stay tied."""
    shards = find_shards(model, plan, world)
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for (path, name), shard in shards.items():
        weights = model.get_submodule(path)._parameters  # noqa: SLF001 - any name is fine
        weight = weights[name]
        assert weight is not None
        if weight not in parts:
            parts[weight] = nn.Parameter(take(weight.detach(), shard), requires_grad=False)
        weights[name] = parts[weight]
    for path, module in model.named_modules():
        if plan.style_of(path) == EXPERTS:
            of_experts = {name: shard for (at, name), shard in shards.items() if at == path}
            setattr(module, SHARDS, of_experts)


def _set_sizes(model: nn.Module, plan: ShardingPlan) -> None:
    """Set modules' sizes to those of this rank's part."""
    for path, module in model.named_modules():
        marked: Any = module
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
        elif isinstance(module, Conv1D):
            marked.nx, marked.nf = module.weight.shape
        for name in plan.divided(path):
            setattr(marked, name, getattr(marked, name) // plan.size)


def _add_up(model: PreTrainedModel, plan: ShardingPlan, world: World) -> None:
    """Add an all-reduce to each layer whose outputs on a rank are partial sums."""
    embeddings = model.get_input_embeddings()
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    for path, module in list(model.named_modules()):
        style = plan.style_of(path)
        parent, _, name = path.rpartition(".")
        if style in BY_INPUTS:
            setattr(model.get_submodule(parent), name, SummedLinear(module, world))
        elif style == EXPERTS and plan.has_whole_experts:
            sum_whole_experts(module, world)
        elif style == EXPERTS:
            sum_experts(module, world)
        elif module is embeddings and style == VOCABULARY:
            first = world.start_of(vocabulary)
            setattr(model.get_submodule(parent), name, VocabularyEmbedding(module, first))
