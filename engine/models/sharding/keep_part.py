"""Keeps this rank's part of a model.

The weights of the whole model are in their files still (see `deferred.py`), so that only parts are
read. transformers' own tensor parallelism is not used: the layers of `sharded_layers.py` can be
packed, quantized and compiled like any others.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.engine.models.cut import Cut
from octavo.engine.models.deferred import take
from octavo.engine.models.experts.expert_layer import CUTS
from octavo.engine.models.sharding.cuts import BY_INPUTS, find_cuts
from octavo.engine.models.sharding.plan import EXPERTS, VOCABULARY, ShardingPlan
from octavo.engine.models.sharding.sharded_layers import (
    SummedLinear,
    VocabularyEmbedding,
    sum_experts,
    sum_whole_experts,
)
from octavo.engine.parallel.world import World


@torch.no_grad()
def keep_part(model: PreTrainedModel, plan: ShardingPlan, world: World) -> None:
    """Keep this rank's part of a model, with layers that sum over ranks where needed.

    Args:
        model: The whole model; changed in place.
        plan: The plan of its parts.
        world: The ranks.
    """
    _take_parts(model, plan, world)
    _set_sizes(model, plan)
    _add_up(model, plan, world)


def _take_parts(model: nn.Module, plan: ShardingPlan, world: World) -> None:
    """Replace each weight by this rank's part; tied weights stay tied."""
    cuts = find_cuts(model, plan, world)
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for (path, name), cut in cuts.items():
        weights = model.get_submodule(path)._parameters  # noqa: SLF001 - any name is fine
        weight = weights[name]
        assert weight is not None
        if weight not in parts:
            parts[weight] = nn.Parameter(take(weight.detach(), cut), requires_grad=False)
        weights[name] = parts[weight]
    for path, module in model.named_modules():
        if plan.style_of(path) == EXPERTS:
            own: dict[str, Cut] = {name: cut for (at, name), cut in cuts.items() if at == path}
            setattr(module, CUTS, own)


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
    """Make ranks sum the outputs of which each computes a part."""
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
