"""MPT: ALiBi, and optional clipping of queries, keys and values."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from octavo.engine.models.attention_layers.alibi import slopes_of
from octavo.engine.models.attention_layers.attend import attend, is_probed


def forward(  # noqa: PLR0917 - as transformers' forward
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],  # noqa: ARG001
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: None = None,  # noqa: ARG001
    attention_mask: Tensor | None = None,
    **_: Any,  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Replace `MptAttention.forward`."""
    fused: Tensor = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
    heads = fused.reshape(*fused.shape[:-1], 3, module.n_heads, module.head_dim)
    query, key, value = (x.transpose(1, 2) for x in heads.unbind(2))
    output = attend(
        *(module, query, key, value, attention_mask),
        scaling=module.softmax_scale,
        alibi_slopes=slopes_of(module, lambda: _slopes(module, position_bias.device)),
    )
    return module.out_proj(output), None


def model_forward(
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],
    *arguments: Any,  # noqa: ANN401
    **keywords: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Replace `MptModel.forward`, which needs a mask: pass one that nothing reads."""
    if not is_probed(module):
        keywords["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool)
    return theirs(*arguments, **keywords)


def _slopes(module: Any, device: torch.device) -> Tensor:  # noqa: ANN401
    build: Callable[..., Tensor] = build_mpt_alibi_tensor
    return -build(module.n_heads, 2, device=device)[:, 0, 0]
