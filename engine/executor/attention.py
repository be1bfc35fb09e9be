"""Joins transformers' models to the paged kernels.

Every transformers decoder calls its attention through `AttentionInterface`, so
one function here serves all of them: it writes the step's K and V into the
paged cache and attends to what the block tables name.
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from kernels.metadata import AttentionMetadata
from kernels.ops import paged_attention, write_kv

PAGED_ATTENTION = "octavo_paged"


@dataclass(frozen=True, slots=True)
class PagedStep:
    """What every layer needs to know of the step in hand.

    Attributes:
        metadata: the batch's sequences and where their K/V lie.
        layers: each layer's (key cache, value cache), both `[num_blocks,
            num_kv_heads, block_size, head_dim]`.
    """

    metadata: AttentionMetadata
    layers: list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ShapeProbe:
    """Passed in place of a step to learn what attention a model does.

    Configs name these figures in many ways; the model itself cannot be wrong.

    Attributes:
        layers: (num_heads, num_kv_heads, key head_dim, value head_dim) of each
            layer, by its index.
    """

    layers: dict[int, tuple[int, int, int, int]]


def _forward(  # noqa: PLR0917 - transformers calls it by position
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - causality is in the metadata
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged_step: PagedStep | ShapeProbe | None = None,
    **_: Any,  # noqa: ANN401 - what else models pass does not matter here
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer, for its `layer_idx`.
        query: `[1, num_heads, num_tokens, head_dim]`, the batch laid flat.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: as key.
        attention_mask: none.
        scaling: of the logits; default 1 / sqrt(head_dim).
        sliding_window: tokens that a token attends to, itself included.
        softcap: bound of the logits, by tanh.
        s_aux: attention sinks, which are not supported.
        paged_step: passed through the model by the executor.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no weights.

    Raises:
        NotImplementedError: the model needs attention of another kind.
    """
    if paged_step is None:
        raise NotImplementedError("it does not pass keyword arguments to its attention")
    if s_aux is not None:
        raise NotImplementedError("it uses attention sinks")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError("its attention is not causal")
    layer = module.layer_idx
    assert isinstance(layer, int)
    if isinstance(paged_step, ShapeProbe):
        paged_step.layers[layer] = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    key_cache, value_cache = paged_step.layers[layer]
    metadata = paged_step.metadata
    write_kv(
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        key_cache,
        value_cache,
        metadata.slot_mapping,
    )
    output = paged_attention(
        query[0].transpose(0, 1),
        key_cache,
        value_cache,
        metadata,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        soft_cap=softcap,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(PAGED_ATTENTION, _forward)
