"""Modules that compute attention in a method `_attn`, with rotated queries and keys.

The method takes and returns heads before tokens. GPT-J and CodeGen rotate adjacent elements of a
head, in their own code.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from octavo.engine.models.attention_layers.attend import attend


def _replacement(
    scaling: Callable[[Any], float], window: Callable[[Any], int | None] = lambda _: None
) -> Callable[..., Any]:
    """Return a replacement for the method of a type of module.

    Args:
        scaling: The scale of a module's scores.
        window: Number of latest tokens that a module attends to; None: all.
    """

    def attn(  # noqa: PLR0917 - as the method
        module: Any,  # noqa: ANN401
        theirs: Callable[..., Any],  # noqa: ARG001
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Return `[1, num_heads, num_tokens, head_dim]`, and None for the weights."""
        # CodeGen rotates in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
        output = attend(
            module,
            query,
            key,
            value,
            attention_mask,
            scaling=scaling(module),
            local_window=window(module),
        )
        return output.reshape(*output.shape[:2], value.shape[1], -1).transpose(1, 2), None

    return attn


def _gpt_neo_window(module: Any) -> int | None:  # noqa: ANN401
    window: int = module.config.window_size
    return window if module.attention_type == "local" else None


gptj = _replacement(lambda module: 1 / module.scale_attn)
"""Replaces `_attn` of `GPTJAttention` and `CodeGenAttention`."""
gpt_neo = _replacement(lambda _: 1.0, _gpt_neo_window)
"""Replaces `GPTNeoSelfAttention._attn`: no scale, and windows in every other layer."""
gpt_neox_japanese = _replacement(lambda module: 1 / module.norm_factor)
"""Replaces `GPTNeoXJapaneseAttention._attn`."""
