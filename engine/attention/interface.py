"""The attention implementation that transformers models call.

Every transformers decoder calls attention through `AttentionInterface`, so one function serves all
of them. It passes Q, K and V to the operator that writes the cache and computes paged attention. If
a module's cache keeps latents, it passes latents; see `latent.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from octavo.engine.attention import operator as paged_attention  # noqa: F401 - defines the operator
from octavo.engine.attention.latent import PRODUCTS, LatentProducts

PAGED_ATTENTION, PROBE = "octavo_paged", "octavo_probe"
"""Names of the implementations: paged attention, and a probe that records models' calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """One of a module's attention calls.

    Attributes:
        layer: The call's number in the model.
        window: Number of tokens that a token attends to, including itself; None: all before it.
        chunk: Chunk length: a token attends to its chunk's tokens up to itself; None: no chunks.
    """

    layer: int
    window: int | None
    chunk: int | None


def number_calls(model: nn.Module, calls: Mapping[nn.Module, Sequence[Call]]) -> None:
    """Assign the model's attention calls to its modules, in order.

    Args:
        model: The model; each run begins with every module's first call.
        calls: The calls of each module.
    """
    for module, module_calls in calls.items():
        marked: Any = module
        marked.octavo_calls, marked.octavo_called = module_calls, 0
    several = [module for module, module_calls in calls.items() if len(module_calls) > 1]
    if several:
        model.register_forward_pre_hook(lambda *_: _restart(several))


def _restart(modules: Sequence[Any]) -> None:
    for module in modules:
        module.octavo_called = 0


def _next_call(module: nn.Module) -> Call:
    marked: Any = module
    calls: Sequence[Call] = marked.octavo_calls
    if len(calls) == 1:
        return calls[0]
    call: Call = calls[marked.octavo_called]
    marked.octavo_called += 1
    return call


def _forward(  # noqa: PLR0917 - transformers calls it by position
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - `probe` reads it
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **_: Any,  # noqa: ANN401 - `probe` refuses those that matter
) -> tuple[torch.Tensor, None]:
    """Compute attention over the paged cache.

    Args:
        module: The attention layer, with calls from `number_calls`. If its cache keeps latents,
            `latent` has set `octavo_products`.
        query: `[1, num_heads, num_tokens, key_dim]`, the flat batch.
        key: `[1, num_kv_heads, num_tokens, key_dim]`, or for latents `[1, 1, num_tokens, latent_dim
            + rotated_dim]`.
        value: `[1, num_kv_heads, num_tokens, value_dim]`, or `[1, 1, num_tokens, latent_dim]`.
        attention_mask: None.
        scaling: Factor of the logits; default 1 / sqrt(key_dim).
        softcap: Bound of the logits, by tanh.
        s_aux: `[num_heads]`, attention sinks: an extra logit per head, without a value.
        alibi_slopes: `[num_heads]` float32: factors of the distances added to logits.

    Returns:
        `[1, num_tokens, num_heads, value_dim]`, and None for the weights.
    """
    call = _next_call(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    products: LatentProducts | None = getattr(module, PRODUCTS, None)
    queries, keys = query[0].transpose(0, 1), key[0].transpose(0, 1)
    if products is not None:
        if s_aux is not None or alibi_slopes is not None:
            raise NotImplementedError("it attends to latents with sinks or ALiBi")
        options = (call.layer, scale, call.window, softcap, call.chunk)
        return products.attend(queries, keys, *options).unsqueeze(0), None
    output = torch.ops.octavo.paged_attention(
        queries,
        keys,
        value[0].transpose(0, 1),
        call.layer,
        scale,
        call.window,
        softcap,
        call.chunk,
        None if s_aux is None else s_aux.float().contiguous(),
        alibi_slopes,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(PAGED_ATTENTION, _forward)
