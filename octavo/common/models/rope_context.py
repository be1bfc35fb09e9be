"""The context up to which a model's rotary frequencies are those of its first training."""

from collections.abc import Mapping
from typing import Any

LONG_ROPE = ("longrope", "su")
"""Names of LongRoPE (https://arxiv.org/abs/2402.13753) in configs, the older one last."""
FIRST_CONTEXT = "original_max_position_embeddings"
CONTEXT = "max_position_embeddings"


def first_context(config: Mapping[str, Any]) -> int | None:
    """Return the tokens beyond which a model has other frequencies for *all* positions.

    transformers chooses by the longest sequence of each forward pass, so a short sequence's tokens
    depend on whether a long one may come.

    Args:
        config: The content of a `config.json`.

    Returns:
        None if its frequencies do not depend on the length.
    """
    text = config.get("text_config") or config
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    sets = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]
    contexts = [_first_context(text, kind) for kind in sets]
    return min((tokens for tokens in contexts if isinstance(tokens, int)), default=None)


def _first_context(text: Mapping[str, Any], kind: Mapping[str, Any]) -> Any:  # noqa: ANN401
    name = str(kind.get("rope_type", kind.get("type", "")))
    if name in LONG_ROPE:
        return kind.get(FIRST_CONTEXT, text.get(FIRST_CONTEXT, text.get(CONTEXT)))
    return text.get(CONTEXT) if name == "dynamic" else None
