"""The logits of the whole model, for ranks that hold a part of it.

The parts are compared with transformers' own forward pass of the whole model, not with a pass split
by the same plan. Rank 0 runs it with weights left in their files; see `deferred.py`.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from octavo.engine.model_shape import ModelShape
from octavo.engine.models.attention_layers import reference_attention
from octavo.engine.models.checks.adapter_reference import TrialReference, trial_reference
from octavo.engine.models.checks.module_routing import ModuleRouting
from octavo.engine.models.checks.reference import Reference, reference, with_rounding
from octavo.engine.models.checks.routing import Choice
from octavo.engine.models.checks.widened import is_narrow, is_small
from octavo.engine.models.deferred import hold
from octavo.engine.models.read_weights import QuantizedCheckpoint, load_weights
from octavo.engine.models.vision import split_vision
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
    left_out: Collection[str] | None,
) -> tuple[Reference, TrialReference | None]:
    """Run transformers' forward pass on rank 0; return the references on all ranks.

    Args:
        path: A directory.
        config: The model's config.
        dtype: Dtype of its weights.
        shape: The dimensions of a part.
        world: The ranks; all of them call this.
        checkpoint: Its checkpoint if its weights are quantized.
        prepare: Called with the model before it runs.
        left_out: See `trial_reference`; None if the model takes no adapters.
    """
    if world.place.rank:
        whole = _shared(world.share(None))
        if left_out is None:
            return whole, None
        names, scales, *tensors = world.share(None)
        known = zip(bytes(names.tolist()).decode().split("\n"), scales.tolist(), strict=True)
        return whole, TrialReference(_shared(tensors), dict(known))
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
    split_vision(model)
    prepare(model)
    if is_small(model):
        hold(model)  # as a part is: its quantized weights are rounded once
    routing = ModuleRouting(model)
    whole = reference(model, shape, routing, CPU)
    if is_narrow(model) and not is_small(model):
        whole = with_rounding(whole, model, routing, CPU, passes=1)  # reads the files
    world.share(_tensors(whole))
    if left_out is None:
        return whole, None
    trial = trial_reference(model, whole, routing, left_out)
    names = torch.tensor(list("\n".join(trial.scales).encode()))
    scales = torch.tensor(list(trial.scales.values()), dtype=torch.float64)
    world.share([names, scales, *_tensors(trial.expected)])
    return whole, trial


def _tensors(whole: Reference) -> list[Tensor]:
    choices = [tensor for choice in whole.choices for tensor in choice]
    return [whole.tokens, whole.logits, whole.rounding, *choices]


def _shared(tensors: Sequence[Tensor]) -> Reference:
    """Return the reference of `_tensors`."""
    tokens, logits, rounding, *flat = tensors
    pairs = zip(flat[::2], flat[1::2], strict=True)
    return Reference(tokens, logits, rounding, tuple(Choice(*pair) for pair in pairs))
