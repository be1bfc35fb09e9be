"""Llama 4: queries of layers without rotary embeddings grow with their positions.

transformers' attention counts the positions itself, from the first token of the batch. Here the
layer around it passes the right positions. The replaced experts compute the same as transformers',
whose views depend on the current number of tokens: a trace would fit only that number.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama4.modeling_llama4 import apply_rotary_emb

from octavo.engine.models.attention_layers.attend import attend
from octavo.engine.models.experts.expert_layer import SHARDS
from octavo.engine.parallel.collectives import sum_over_ranks


def layer_forward(
    module: Any,  # noqa: ANN401, ARG001
    theirs: Callable[..., Any],
    *arguments: Any,  # noqa: ANN401
    **keywords: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Replace `Llama4TextDecoderLayer.forward`: pass the positions to its attention."""
    return theirs(*arguments, **keywords, positions=keywords["position_ids"])


def forward(
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],  # noqa: ARG001
    hidden_states: Tensor,
    position_embeddings: Tensor,
    attention_mask: Tensor | None,
    *,
    positions: Tensor,
    **_: Any,  # noqa: ANN401 - of caches and outputs
) -> tuple[Tensor, None]:
    """Replace `Llama4TextAttention.forward`."""
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (
        x.reshape(*x.shape[:-1], -1, module.head_dim)
        for x in (project(hidden_states) for project in projections)
    )
    if module.use_rope:
        query, key = apply_rotary_emb(query, key, position_embeddings)
    if hasattr(module, "qk_norm"):
        query, key = module.qk_norm(query), module.qk_norm(key)
    if module.attn_temperature_tuning and not module.use_rope:
        query = (query * _temperatures(module, positions)).to(query.dtype)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    output = attend(module, query, key, value, attention_mask, scaling=module.scaling)
    return module.o_proj(output), None


def experts_forward(
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],  # noqa: ARG001
    hidden_states: Tensor,
) -> tuple[Tensor, Tensor]:
    """Replace `Llama4TextMoe.forward`: run all experts on rows scaled by the router's scores.

    An expert that is not chosen has the score 0 and returns 0.
    """
    rows = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(rows)
    experts = module.experts
    scaled = rows * scores.transpose(0, 1)[..., None]
    gate, up = torch.bmm(scaled, experts.gate_up_proj).chunk(2, dim=-1)
    routed = torch.bmm(up * experts.act_fn(gate), experts.down_proj)
    together = routed.sum(0)
    if hasattr(experts, SHARDS):  # partial sums: this rank has a shard of each expert
        together = sum_over_ranks(together)
    return module.shared_expert(rows) + together, logits


def _temperatures(module: Any, positions: Tensor) -> Tensor:  # noqa: ANN401
    """Return the factors of queries, `[1, num_tokens, 1, 1]` float32."""
    floors = torch.floor((positions.float() + 1.0) / module.floor_scale)
    scale: float = module.attn_scale
    return (torch.log1p(floors) * scale + 1.0)[..., None, None]
