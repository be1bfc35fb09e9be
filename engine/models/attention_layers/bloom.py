"""Bloom: ALiBi, and a residual that attention adds itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from octavo.engine.models.attention_layers.alibi import slopes_of
from octavo.engine.models.attention_layers.attend import attend


def forward(  # noqa: PLR0917 - as transformers' forward
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],  # noqa: ARG001
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    **_: Any,  # noqa: ANN401 - of caches and outputs
) -> tuple[Tensor, None]:
    """Replace `BloomAttention.forward`."""
    fused: Tensor = module.query_key_value(hidden_states)
    heads = fused.reshape(*fused.shape[:-1], module.num_heads, 3, module.head_dim)
    query, key, value = (x.transpose(1, 2) for x in heads.unbind(3))
    output = attend(
        *(module, query, key, value, attention_mask),
        scaling=module.inv_norm_factor,
        alibi_slopes=slopes_of(module, lambda: _slopes(module, alibi.device)),
    )
    return module.dense(output) + residual, None


def _slopes(module: Any, device: torch.device) -> Tensor:  # noqa: ANN401
    ones = torch.ones((1, 2), dtype=torch.int64, device=device)
    return build_alibi_tensor(ones, module.num_heads, torch.float32)[:, 0, 1]
