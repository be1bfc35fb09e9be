"""Joins transformers' models to the paged kernels.

Every transformers decoder calls its attention through `AttentionInterface`, so
one function here serves all of them: it hands the step's Q, K and V to the
operator that writes the paged cache and attends to what the block tables name.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from octavo.engine.attention import operator as paged_attention  # noqa: F401 - defines the operator

PAGED_ATTENTION = "octavo_paged"


def _forward(  # noqa: PLR0917 - transformers calls it by position
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - `probe` has read it
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,  # noqa: ANN401 - `probe` refuses what matters
) -> tuple[torch.Tensor, None]:
    """Attend as transformers asks, over the paged cache.

    Args:
        module: the attention layer: `layer_idx` is its own, and `octavo_window`, the tokens
            that a token attends to, itself included, was set by `probe`.
        query: `[1, num_heads, num_tokens, head_dim]`, the batch laid flat.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: as key.
        attention_mask: None.
        scaling: of the logits; default 1 / sqrt(head_dim).
        softcap: bound of the logits, by tanh.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no weights.
    """
    own: Any = module
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.ops.octavo.paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        own.layer_idx,
        scale,
        own.octavo_window,
        softcap,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(PAGED_ATTENTION, _forward)
