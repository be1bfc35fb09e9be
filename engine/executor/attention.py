"""Joins transformers' models to the paged kernels.

Every transformers decoder calls its attention through `AttentionInterface`, so
one function here serves all of them: it hands the step's Q, K and V to the
operator that writes the paged cache and attends to what the block tables name.
"""

from typing import Any

import torch
from transformers import AttentionInterface

from engine.executor import paged_attention  # noqa: F401 - defines the operator

PAGED_ATTENTION = "octavo_paged"


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

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no weights.

    Raises:
        NotImplementedError: the model needs attention of another kind.
    """
    if s_aux is not None:
        raise NotImplementedError("it uses attention sinks")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError("its attention is not causal")
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.ops.octavo.paged_attention(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        layer,
        scale,
        sliding_window,
        softcap,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(PAGED_ATTENTION, _forward)
