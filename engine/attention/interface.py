"""The attention implementation that transformers models call.

Every transformers decoder calls attention through `AttentionInterface`, so one function serves all
of them. It passes Q, K and V to the operator that writes the cache and computes paged attention.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from octavo.engine.attention import operator as paged_attention  # noqa: F401 - defines the operator

PAGED_ATTENTION, PROBE = "octavo_paged", "octavo_probe"
"""Names of implementations: the paged one, and one that records what models ask for."""


def _forward(  # noqa: PLR0917 - transformers calls it by position
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - read by `probe`
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    **_: Any,  # noqa: ANN401 - `probe` refuses those that matter
) -> tuple[torch.Tensor, None]:
    """Compute attention over the paged cache.

    Args:
        module: The attention layer. `probe` has set `octavo_layer`, the number of its call, and
            `octavo_mask`, the keys that a token attends to.
        query: `[1, num_heads, num_tokens, key_dim]`, the flat batch.
        key: `[1, num_kv_heads, num_tokens, key_dim]`.
        value: `[1, num_kv_heads, num_tokens, value_dim]`.
        attention_mask: None.
        scaling: Factor of the logits; default 1 / sqrt(key_dim).
        softcap: Bound of the logits, by tanh.
        s_aux: `[num_heads]`, attention sinks: a logit of each head that has no value.
        alibi_slopes: `[num_heads]` float32: factors of the distances that are added to logits.

    Returns:
        `[1, num_tokens, num_heads, value_dim]`, and None for the weights.
    """
    own: Any = module
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.ops.octavo.paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        own.octavo_layer,
        scale,
        own.octavo_mask.window,
        softcap,
        own.octavo_mask.chunk,
        None if s_aux is None else s_aux.float().contiguous(),
        alibi_slopes,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(PAGED_ATTENTION, _forward)
