"""A tokenizer whose control tokens have secret spellings.

It encodes text like the model's tokenizer, whose parts it shares, but no caller's text can spell
its control tokens.
"""

import json
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import tokenizers


class Respelt:
    """A tokenizer with secret spellings of its control tokens.

    Args:
        backend: The model's `tokenizers.Tokenizer`.
        added: Added tokens, by spelling.
        control: Spellings of the control tokens.

    Attributes:
        spellings: Secret spelling of each control token, by its spelling in the model.
    """

    def __init__(
        self,
        backend: Any,  # noqa: ANN401 - tokenizers has no types
        added: Mapping[str, Any],
        control: Collection[str],
    ) -> None:
        self.spellings = {text: f"x{secrets.token_hex(16)}x" for text in control}
        self._in_vocabulary = {
            text: i for text in control if (i := backend.model.token_to_id(text)) is not None
        }
        self._unknown = getattr(backend.model, "unk_token", None)
        model = backend.model
        self._make(backend, model, added)
        if any(self.made_of_text(self.encode(text), {text}) for text in self._in_vocabulary):
            self._make(backend, _without(backend, self.spellings), added)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text with secret spellings, by this tokenizer's ids."""
        # Unlike `encode`, this releases the GIL.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def own_ids(self, ids: Iterable[int]) -> list[int]:
        """Convert ids to those of the model's tokenizer."""
        return [self._ids.get(i, i) for i in ids]

    def made_of_text(self, ids: Sequence[int], control: Collection[str]) -> str | None:
        """Return a control token that ordinary text became, if any."""
        spelt = set(ids).difference(self._ids)
        return next(
            (
                text
                for text in sorted(control)
                # Text outside the vocabulary always becomes the unknown token.
                if self._in_vocabulary.get(text) in spelt and text != self._unknown
            ),
            None,
        )

    def _make(self, backend: Any, model: Any, added: Mapping[str, Any]) -> None:  # noqa: ANN401
        self._tokenizer: Any = tokenizers.Tokenizer(model)
        self._tokenizer.normalizer = backend.normalizer
        self._tokenizer.pre_tokenizer = backend.pre_tokenizer
        respelt = {
            text: _respell(token, self.spellings.get(text, text)) for text, token in added.items()
        }
        special = [token for token in respelt.values() if token.special]
        self._tokenizer.add_special_tokens(special)
        self._tokenizer.add_tokens([token for token in respelt.values() if not token.special])
        self._ids = {
            self._tokenizer.token_to_id(token.content): backend.token_to_id(text)
            for text, token in respelt.items()
        }


def _respell(token: Any, spelling: str) -> tokenizers.AddedToken:  # noqa: ANN401
    return tokenizers.AddedToken(
        spelling,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=token.special,
    )


def _without(backend: Any, spellings: Mapping[str, str]) -> Any:  # noqa: ANN401
    """Return the tokenizer model with control tokens under their secret spellings only."""
    state = json.loads(backend.to_str())
    model = state["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {spellings.get(text, text): i for text, i in vocabulary.items()}
    else:
        model["vocab"] = [[spellings.get(text, text), score] for text, score in vocabulary]
    if "merges" in model:
        pairs = (pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"])
        model["merges"] = [pair for pair in pairs if not spellings.keys() & {*pair, "".join(pair)}]
    if model.get("unk_token") is not None:
        model["unk_token"] = spellings.get(model["unk_token"], model["unk_token"])
    parts: dict[str, Any] = {"added_tokens": [], "normalizer": None, "pre_tokenizer": None}
    state |= parts | {"post_processor": None, "decoder": None}
    return tokenizers.Tokenizer.from_str(json.dumps(state)).model
