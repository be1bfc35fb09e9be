"""Finds the context length beyond which a model changes its rotary frequencies."""

from collections.abc import Mapping
from typing import Any

LONG_ROPE = ("longrope", "su")
"""Config names of LongRoPE (https://arxiv.org/abs/2402.13753), the older one last."""
FIRST_CONTEXT = "original_max_position_embeddings"
CONTEXT = "max_position_embeddings"


def first_context(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens beyond which frequencies change for *all* positions.

    transformers decides by the longest sequence of each forward pass, so a short sequence's tokens
    would depend on the others in the batch.

    Args:
        config: The content of a `config.json`.

    Returns:
        Number of tokens; None if the frequencies do not depend on the length.
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
