"""Finds attention modules that expand latents to keys and values as `Expansion` does.

Families differ in how they compute and rotate queries and latents and use attention's output; their
code for that stays. Two checks decide: `expand_kv` computes the same as `Expansion` with small
random weights, and its results reach attention unchanged in the probe.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.attention.latent import Expansion
from octavo.engine.model_shape import LayerShape
from octavo.kernels.ops import HEAD_DIM_MULTIPLE, MAX_KEY_DIM, MAX_VALUE_DIM

Expanded = tuple[Tensor, Tensor, Tensor, Tensor]
"""Latents, rotated elements, and the keys and values computed from them."""
LINEAR = "kv_b_proj"
RANK, HEADS, TOKENS = 8, 2, 3
"""Sizes of the small expansion."""


@contextmanager
def watching_expansions(model: PreTrainedModel) -> Iterator[dict[nn.Module, Expanded]]:
    """Record each module's latest call of `expand_kv`."""
    calls: dict[nn.Module, Expanded] = {}
    watched = [module for module in model.modules() if hasattr(module, "expand_kv")]
    kept = [vars(module).get("expand_kv") for module in watched]
    for module in watched:
        attention: Any = module
        attention.expand_kv = _watched(module, attention.expand_kv, calls)
    try:
        yield calls
    finally:
        for module, before in zip(watched, kept, strict=True):
            del module.expand_kv
            if before is not None:
                attention = module
                attention.expand_kv = before


def _watched(module: nn.Module, expand: Any, calls: dict[nn.Module, Expanded]) -> Any:  # noqa: ANN401
    def call(latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = expand(latent, rotated)
        calls[module] = latent, rotated, keys, values
        return keys, values

    return call


def find_expansion(
    module: nn.Module, call: Expanded | None, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Expansion, LayerShape] | None:
    """Return a module's expansion of latents, and the layer's shape if latents are cached.

    Args:
        module: An attention module.
        call: Its latest call of `expand_kv`; None without calls.
        query: Attention's argument `[1, num_heads, num_tokens, key_dim]`.
        key: Attention's argument `[1, num_heads, num_tokens, key_dim]`.
        value: Attention's argument `[1, num_heads, num_tokens, key_dim]`.

    Returns:
        None if it expands no latents, or if latents would not take less memory.
    """
    if call is None or call[2] is not key or call[3] is not value:
        return None
    latent, rotated = call[0].shape, call[1].shape
    heads, key_dim, value_dim = query.shape[1], key.shape[3], value.shape[3]
    linear: Any = getattr(module, LINEAR, None)
    expansion = Expansion(LINEAR, key_dim - rotated[3], value_dim)
    shape = LayerShape(heads, 1, latent[3] + rotated[3], latent[3], latent=True)
    whole = LayerShape(heads, heads, key_dim, value_dim)
    if (
        latent[:2] == rotated[:2] == (1, 1)
        and key.shape[1] == value.shape[1] == heads
        and query.shape[3] == key_dim
        and type(linear) is nn.Linear
        and linear.bias is None
        and linear.weight.shape == (heads * (expansion.key_dim + value_dim), latent[3])
        and linear.weight.dtype == query.dtype
        and _has_kernels(shape)
        and shape.token_elements < whole.token_elements
        and _is_plain(module, expansion, rotated[3])
    ):
        return expansion, shape
    return None


def _has_kernels(shape: LayerShape) -> bool:
    sizes = (shape.key_dim, MAX_KEY_DIM), (shape.value_dim, MAX_VALUE_DIM)
    return all(size <= most and size % HEAD_DIM_MULTIPLE == 0 for size, most in sizes)


@torch.inference_mode()
def _is_plain(module: nn.Module, expansion: Expansion, rotated_dim: int) -> bool:
    """Return whether a module's `expand_kv` computes an `Expansion` with a small linear layer.

    The module has only that layer and the sizes, so the result cannot depend on anything else.
    """
    generator = torch.Generator().manual_seed(0)
    key_dim, value_dim = expansion.key_dim, expansion.value_dim
    linear = nn.Linear(RANK, HEADS * (key_dim + value_dim), bias=False)
    linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator))
    latent, rotated = (
        torch.randn((1, 1, TOKENS, size), generator=generator) for size in (RANK, rotated_dim)
    )
    sizes = {"qk_nope_head_dim": key_dim, "v_head_dim": value_dim, "qk_rope_head_dim": rotated_dim}
    kind: Any = type(module)
    try:
        computed = kind.expand_kv(SimpleNamespace(**{LINEAR: linear}, **sizes), latent, rotated)
    except Exception:  # noqa: BLE001 - it needs more than that
        return False
    by_head = linear(latent).view(1, TOKENS, HEADS, -1).transpose(1, 2)
    key, value = by_head.split([key_dim, value_dim], -1)
    expected = torch.cat([key, rotated.expand(-1, HEADS, -1, -1)], -1), value
    return all(
        ours.shape == theirs.shape and torch.allclose(ours, theirs)
        for ours, theirs in zip(expected, computed, strict=True)
    )
