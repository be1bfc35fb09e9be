"""Fixes rotary embeddings whose frequencies depend on the batch.

In transformers, two types depend on the longest position in a forward pass. LongRoPE
(https://arxiv.org/abs/2402.13753) has one set of frequencies up to the original context and one
beyond; dynamic NTK scaling recomputes them beyond it. A request would then change the frequencies
of others in its batch, and of its own cached keys. So an engine uses one set, chosen by the maximum
sequence length.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

FIXED = "fixed_by_octavo"
"""Type name of a rotary embedding with fixed frequencies."""
BATCH_DEPENDENT = ("dynamic", "longrope")


def fix_rope(model: PreTrainedModel, max_position: int, max_model_len: int | None) -> int:
    """Fix the frequencies of rotary embeddings that depend on the batch.

    Args:
        model: The model; changed in place.
        max_position: The context in the model's config.
        max_model_len: The maximum sequence length, if the user set it.

    Returns:
        The model's context: beyond the original one only if the user set more.

    Raises:
        NotImplementedError: The model's own code chooses its frequencies.
    """
    config: Any = model.config.get_text_config(decoder=True)
    kinds = [kind for kind in _parameters(config) if _is_batch_dependent(kind["rope_type"])]
    if not kinds:
        return max_position
    original = min(_original(kind, max_position) for kind in kinds)
    asked = max_model_len or original
    if asked <= original:
        context = original
    else:
        stretch = [float(k["factor"]) for k in kinds if "dynamic" in k["rope_type"]]
        context = min(asked, int(max_position * min(stretch, default=1.0)))
    for module in model.modules():
        if hasattr(module, "rope_type") and hasattr(module, "inv_freq"):
            _fix(module, context, original, model.device)
        elif isinstance(getattr(module, "rope_type", None), dict):
            _fix_by_layer_type(module, context, model.device)
    return context


def _original(kind: dict[str, Any], max_position: int) -> int:
    """Return the original context, which uses the first set of frequencies."""
    if "dynamic" in kind["rope_type"]:
        return max_position
    return int(kind.get("original_max_position_embeddings", max_position))


def _is_batch_dependent(rope_type: str) -> bool:
    return any(kind in rope_type for kind in BATCH_DEPENDENT)


def _parameters(config: Any) -> list[dict[str, Any]]:  # noqa: ANN401 - no declared field
    """Return the config's rotary parameters: one set, or one per type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [parameters] if "rope_type" in parameters else parameters.values()
    return [kind for kind in sets if isinstance(kind, dict) and "rope_type" in kind]


def _fix(module: nn.Module, context: int, original: int, device: torch.device) -> None:
    rope: Any = module
    if not _is_batch_dependent(rope.rope_type):
        return
    x = torch.zeros((1, 1, 1), device=device)
    ends = [torch.tensor([[position]], device=device) for position in (original - 1, context - 1)]
    expected = rope(x, ends[-1])  # also sets the frequencies for the whole context
    rope.rope_type = FIXED
    rope.original_inv_freq = rope.inv_freq
    rope(x, ends[0])
    for was, stays in zip(expected, rope(x, ends[-1]), strict=True):
        if not torch.equal(was, stays):
            raise NotImplementedError(f"{type(module).__name__} updates its own frequencies")
    short = _scale(rope, x, ends[0])
    if short is not None and short != _scale(rope, x, ends[-1]):
        raise NotImplementedError(
            f"{type(module).__name__} scales by the longest position in a batch; set"
            f" --max-model-len to {original} or less"
        )


def _scale(rope: Any, x: torch.Tensor, position: torch.Tensor) -> float | None:  # noqa: ANN401
    """Return the factor of cosines and sines: the root of the sum of their squares."""
    cos, sin = rope(x, position)
    return round(float((cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2).sqrt()), 5)


def _fix_by_layer_type(module: nn.Module, context: int, device: torch.device) -> None:
    rope: Any = module
    x, last = torch.zeros((1, 1, 1), device=device), torch.tensor([[context - 1]], device=device)
    for layer_type, rope_type in rope.rope_type.items():
        if _is_batch_dependent(rope_type):
            rope(x, last, layer_type)
            rope.rope_type[layer_type] = FIXED
