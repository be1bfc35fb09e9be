"""Modules that compute attention in a method `_attn`, with rotated queries and keys.

The method takes and returns heads before tokens. GPT-J and CodeGen rotate adjacent elements of a
head, in their own code.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from octavo.engine.models.attention_layers.attend import attend


def gptj(  # noqa: PLR0917 - as the method
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Replace `_attn` of `GPTJAttention` and `CodeGenAttention`."""
    return _attend(module, query, key, value, attention_mask, 1 / module.scale_attn)


def gpt_neo(  # noqa: PLR0917
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Replace `GPTNeoSelfAttention._attn`: no scale, and windows in every other layer."""
    window = module.config.window_size if module.attention_type == "local" else None
    return _attend(module, query, key, value, attention_mask, 1.0, window)


def gpt_neox_japanese(  # noqa: PLR0917
    module: Any,  # noqa: ANN401
    theirs: Callable[..., Any],  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Replace `GPTNeoXJapaneseAttention._attn`."""
    return _attend(module, query, key, value, attention_mask, 1 / module.norm_factor)


def _attend(  # noqa: PLR0917
    module: Any,  # noqa: ANN401
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    window: int | None = None,
) -> tuple[Tensor, None]:
    """Return `[1, num_heads, num_tokens, head_dim]`, and None for the weights."""
    # CodeGen rotates in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = attend(module, query, key, value, attention_mask, scaling=scaling, local_window=window)
    return output.reshape(*output.shape[:2], value.shape[1], -1).transpose(1, 2), None
