"""The attention implementation that transformers models call.

Every transformers decoder calls attention through `AttentionInterface`, so one function serves all
of them. It passes Q, K and V to the operator that writes the cache and computes paged attention.
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
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - read by `probe`
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,  # noqa: ANN401 - `probe` refuses those that matter
) -> tuple[torch.Tensor, None]:
    """Compute attention over the paged cache.

    Args:
        module: The attention layer. `probe` has set `octavo_layer`, the number of its call, and
            `octavo_window`, the number of tokens that a token attends to, including itself.
        query: `[1, num_heads, num_tokens, head_dim]`, the flat batch.
        key: `[1, num_kv_heads, num_tokens, head_dim]`.
        value: As `key`.
        attention_mask: None.
        scaling: Factor of the logits; default 1 / sqrt(head_dim).
        softcap: Bound of the logits, by tanh.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and None for the weights.
    """
    own: Any = module
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.ops.octavo.paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        own.octavo_layer,
        scale,
        own.octavo_window,
        softcap,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(PAGED_ATTENTION, _forward)
