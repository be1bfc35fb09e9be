"""Attention for the replacements of models' attention modules."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from octavo.engine.attention.interface import PAGED_ATTENTION, PROBE

OWN_CONFIG = "octavo_config"
"""Attribute of a replaced module: the config that names its attention implementation."""


def is_paged(module: nn.Module) -> bool:
    """Return whether a replaced module runs with Octavo's attention."""
    return _implementation(module) in {PAGED_ATTENTION, PROBE}


def is_probed(module: nn.Module) -> bool:
    """Return whether a replaced module runs within the probe."""
    return _implementation(module) == PROBE


def _implementation(module: nn.Module) -> str:
    config: Any = getattr(module, OWN_CONFIG)
    name: str = config._attn_implementation  # noqa: SLF001 - no public name
    return name


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float,
    alibi_slopes: Tensor | None = None,
    local_window: int | None = None,
) -> Tensor:
    """Call the attention implementation that a replaced module's config names.

    Args:
        module: The module.
        query: `[1, num_heads, num_tokens, key_dim]`.
        key: `[1, num_kv_heads, num_tokens, key_dim]`.
        value: `[1, num_kv_heads, num_tokens, value_dim]`.
        mask: The mask that the model passed.
        scaling: Factor of the logits.
        alibi_slopes: `[num_heads]` float32: factors of the distances added to logits.
        local_window: A window that the mask does not have: the number of tokens that a token
            attends to, including itself.

    Returns:
        `[1, num_tokens, num_heads * value_dim]`.
    """
    function: Any = AttentionInterface._global_mapping[_implementation(module)]  # noqa: SLF001
    keywords = {"alibi_slopes": alibi_slopes, "local_window": local_window}
    output: Tensor = function(module, query, key, value, mask, scaling=scaling, **keywords)[0]
    return output.flatten(2)
