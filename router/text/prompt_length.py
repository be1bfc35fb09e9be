"""Rejects too long texts before all of their tokens are computed.

Tokenizing takes two seconds per MiB and a hundred times the text's memory. If a token's maximum
bytes are known, a text that cannot fit the context is rejected by length alone; otherwise its
tokens are counted piece by piece, until there are too many.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import pre_tokenizers

PIECE = 16 << 10
"""Characters per piece."""
CHARACTERS_PER_TOKEN = 4
"""Characters per allowed token up to which texts are not counted first."""
PIECE_TOKENS = 64
"""Maximum extra tokens of a piece because of the cut."""
MARGIN = 0.25
"""Maximum share of extra tokens of all pieces, which are cut at spaces if possible."""
LOSSLESS = {"ByteLevel", "Digits"}
"""Pre-tokenizers that keep all characters."""


def max_token_bytes(backend: Any) -> int | None:  # noqa: ANN401 - tokenizers has no types
    """Return the maximum bytes of text per token of a `tokenizers.Tokenizer`.

    Return None if there is no maximum: a tokenizer that normalizes text or drops spaces can turn
    text of any length into few tokens.
    """
    if backend.normalizer is not None:
        return None
    state = json.loads(backend.to_str())  # takes a second if the vocabulary is large
    model, added = state["model"], state["added_tokens"]
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    steps = list(_steps(state["pre_tokenizer"]))
    lossless = (
        model["type"] == "BPE"
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and alphabet <= model["vocab"].keys()
        and any(step["type"] == "ByteLevel" for step in steps)
        and all(map(_is_lossless, steps))
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not lossless:
        return None
    return max(*map(len, model["vocab"]), *(len(token["content"].encode()) for token in added), 0)


def may_fit(text: str, max_tokens: int, count: Callable[[str], int]) -> bool:
    """Return whether a text may have at most `max_tokens` tokens; False only if it has more.

    Args:
        text: A text of any length.
        max_tokens: Maximum tokens.
        count: Returns the number of tokens of a piece.
    """
    if len(text) <= CHARACTERS_PER_TOKEN * max_tokens:
        return True
    room = max_tokens * (1 + MARGIN)
    for piece in _pieces(text):
        room += PIECE_TOKENS - count(piece)
        if room < 0:
            return False
    return True


def _pieces(text: str) -> Iterator[str]:
    """Split a text before spaces, if it has any."""
    start = 0
    while start < len(text):
        end = start + PIECE
        if end < len(text):
            space = max(text.rfind(" ", start + 1, end), text.rfind("\n", start + 1, end))
            end = space if space > 0 else end
        yield text[start:end]
        start = end


def _steps(pre_tokenizer: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if pre_tokenizer is None:
        return
    if pre_tokenizer["type"] == "Sequence":
        for step in pre_tokenizer["pretokenizers"]:
            yield from _steps(step)
    else:
        yield pre_tokenizer


def _is_lossless(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    return step["type"] in LOSSLESS
