"""The logits of the whole model, for ranks that hold a part of it.

The parts are compared with transformers' own forward pass of the whole model, not with a pass split
by the same plan. Rank 0 runs it with weights left in their files; see `deferred.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.engine.model_shape import ModelShape
from octavo.engine.models.attention_layers import reference_attention
from octavo.engine.models.checks.module_routing import ModuleRouting
from octavo.engine.models.checks.reference import Reference, reference, with_rounding
from octavo.engine.models.checks.routing import Choice
from octavo.engine.models.checks.widened import is_narrow, is_small
from octavo.engine.models.read_weights import QuantizedCheckpoint, load_weights
from octavo.engine.parallel.world import World

CPU = torch.device("cpu")


def whole_reference(
    path: str,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    shape: ModelShape,
    world: World,
    *,
    checkpoint: QuantizedCheckpoint | None,
    prepare: Callable[[PreTrainedModel], Any],
) -> Reference:
    """Run transformers' forward pass on rank 0; return the logits on all ranks.

    Args:
        path: A directory.
        config: The model's config.
        dtype: Dtype of its weights.
        shape: The dimensions of a part.
        world: The ranks; all of them call this.
        checkpoint: Its checkpoint if its weights are quantized.
        prepare: Called with the model before it runs.
    """
    if world.place.rank:
        tokens, logits, rounding, *flat = world.share(None)
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return Reference(tokens, logits, rounding, tuple(Choice(*pair) for pair in pairs))
    model = load_weights(
        path,
        config,
        checkpoint,
        dtype=dtype,
        attn_implementation=reference_attention(config),
        device_map=CPU,
        deferred=True,
    )
    model.train(mode=False)
    prepare(model)
    routing = ModuleRouting(model)
    whole = reference(model, shape, routing, CPU)
    if is_narrow(model) and not is_small(model):
        whole = with_rounding(whole, model, routing, CPU, passes=1)  # reads the files
    flat = [tensor for choice in whole.choices for tensor in choice]
    world.share([whole.tokens, whole.logits, whole.rounding, *flat])
    return whole
