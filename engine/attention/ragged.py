"""Attention of whole texts, for models that embed: nothing is kept, so there is no cache.

Models call it through transformers' `AttentionInterface`, like paged attention. All texts of a step
lie in one row, without padding; `attending_within` sets where each begins.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from octavo.engine.operators import define
from octavo.kernels import reference

RAGGED_ATTENTION, TILED_ATTENTION = "octavo_ragged", "octavo_tiled"
"""Names of the implementations in transformers: of texts in one row, and of images in tiles."""
HARMLESS = frozenset({"dropout", "is_causal", "position_ids", "output_attentions", "use_cache"})
"""Keywords that change nothing here."""

_starts: ContextVar[torch.Tensor] = ContextVar("octavo_text_starts")

define(
    "ragged_attention(Tensor query, Tensor key, Tensor value, Tensor starts, float scale,"
    " int reach, bool causal) -> Tensor",
    lambda query, _key, value, *_: query.new_empty(*query.shape[:2], value.shape[2]),
    native=True,
    CompositeExplicitAutograd=reference.ragged_attention,
)


@contextmanager
def attending_within(starts: torch.Tensor) -> Iterator[None]:
    """Set the texts of the step that runs in this context.

    Args:
        starts: `[num_texts + 1]` int32: the first row of each text, and the end.
    """
    token = _starts.set(starts)
    try:
        yield
    finally:
        _starts.reset(token)


def _forward(  # noqa: PLR0917 - transformers calls it by position
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **keywords: Any,  # noqa: ANN401 - whatever models pass
) -> tuple[torch.Tensor, None]:
    """Compute attention within each text.

    Args:
        module: The attention layer, which says whether it is causal.
        query: `[1, num_heads, num_tokens, key_dim]`.
        key: `[1, num_kv_heads, num_tokens, key_dim]`.
        value: `[1, num_kv_heads, num_tokens, value_dim]`.
        attention_mask: None.
        scaling: Factor of the logits; default 1 / sqrt(key_dim).
        sliding_window: Number of tokens, itself included, that a token sees in one direction.
        **keywords: Refused unless they change nothing.

    Returns:
        `[1, num_tokens, num_heads, value_dim]`, and None for the weights.

    Raises:
        NotImplementedError: There is no kernel for the call.
    """
    unknown = [name for name, given in keywords.items() if name not in HARMLESS and given]
    if attention_mask is not None or unknown:
        name = unknown[0] if unknown else "attention_mask"
        raise NotImplementedError(f"its attention takes {name!r}, which Octavo does not support")
    output = torch.ops.octavo.ragged_attention(
        *(x[0].transpose(0, 1) for x in (query, key, value)),
        _starts.get(),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        -1 if sliding_window is None else sliding_window - 1,
        bool(getattr(module, "is_causal", False)),
    )
    return output.unsqueeze(0), None


def _attend_in_tiles(  # noqa: PLR0917 - transformers calls it by position
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **keywords: Any,  # noqa: ANN401 - whatever models pass
) -> tuple[torch.Tensor, None]:
    """Compute attention within each tile; PyTorch computes what Octavo has no kernel for.

    Args:
        module: The attention layer.
        query: `[num_tiles, num_heads, num_tokens, head_dim]`; see `_forward`.
        key: `[num_tiles, num_kv_heads, num_tokens, head_dim]`.
        value: `[num_tiles, num_kv_heads, num_tokens, value_dim]`.
        attention_mask: The mask; None if all tokens see all.
        scaling: See `_forward`.
        **keywords: See `_forward`.
    """
    tiles, _, tokens, size = query.shape
    fits = key.shape[2] == tokens and size % 8 == 0 and value.shape[3] % 8 == 0
    causal = keywords.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    unknown = any(given for name, given in keywords.items() if name not in HARMLESS)
    if attention_mask is not None or causal or unknown or not fits:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **keywords
        )
        return output
    rows = torch.ops.octavo.ragged_attention(
        *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)),
        torch.arange(0, (tiles + 1) * tokens, tokens, dtype=torch.int32),
        size**-0.5 if scaling is None else scaling,
        -1,
        False,
    )
    return rows.unflatten(0, (tiles, tokens)), None


AttentionInterface.register(RAGGED_ATTENTION, _forward)
AttentionInterface.register(TILED_ATTENTION, _attend_in_tiles)
AttentionMaskInterface.register(TILED_ATTENTION, sdpa_mask)
