"""Falcon: rotary embeddings or ALiBi, with a KV head for each head, group, or all."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, build_alibi_tensor

from octavo.engine.models.attention_layers.alibi import slopes_of
from octavo.engine.models.attention_layers.attend import attend


def forward(  # noqa: PLR0917 - as transformers' forward
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],  # noqa: ARG001
    hidden_states: Tensor,
    alibi: None,  # noqa: ARG001 - see `model_forward`
    attention_mask: Tensor | None,
    position_ids: Tensor | None = None,  # noqa: ARG001
    *,
    position_embeddings: tuple[Tensor, Tensor],
    **_: Any,  # noqa: ANN401 - of caches and outputs
) -> tuple[Tensor, None]:
    """Replace `FalconAttention.forward`."""
    query, key, value = (x.transpose(1, 2) for x in _split(module, hidden_states))
    slopes = None
    if module.config.alibi:
        slopes = slopes_of(module, lambda: _slopes(module, hidden_states.device))
    else:
        rotate: Callable[..., tuple[Tensor, Tensor]] = apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    output = attend(
        *(module, query, key, value, attention_mask),
        scaling=module.inv_norm_factor,
        alibi_slopes=slopes,
    )
    return module.dense(output), None


def model_forward(
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],
    *arguments: Any,  # noqa: ANN401
    **keywords: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Replace `FalconModel.forward`: do not add ALiBi to the mask."""
    use_alibi, module.use_alibi = module.use_alibi, False
    try:
        return theirs(*arguments, **keywords)
    finally:
        module.use_alibi = use_alibi


def _split(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # noqa: ANN401
    """Return queries, keys and values, each `[1, num_tokens, heads, head_dim]`."""
    fused: Tensor = module.query_key_value(hidden_states)
    heads, kv_heads = module.num_heads, module.num_kv_heads
    # A group's queries are followed by its key head and its value head.
    sizes = kv_heads, heads // kv_heads + 2, module.head_dim
    groups = fused.reshape(*fused.shape[:-1], *sizes)
    return groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]


def _slopes(module: Any, device: torch.device) -> Tensor:  # noqa: ANN401
    ones = torch.ones((1, 2), dtype=torch.int64, device=device)
    alibi = build_alibi_tensor(ones, module.num_heads, torch.float32)
    scale: float = module.inv_norm_factor
    return alibi[:, 0, 1] * scale
