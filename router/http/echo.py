"""The echoed prompt of /v1/completions (`echo`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from octavo.router.http.answer_format import finite
from octavo.router.http.vocabulary import Vocabulary
from octavo.router.text.detokenizer import Detokenizer
from octavo.v1.generation_pb2 import Accepted
from octavo.v1.sampling_pb2 import TokenLogprob

Columns = dict[str, list[Any]]
"""Log-probabilities in OpenAI's legacy form: one list per property."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text, and the columns of its tokens' log-probabilities.

    Attributes:
        text: The prompt's text.
        columns: Log-probabilities of the prompt's tokens; None if not requested.
    """

    text: str
    columns: Columns | None

    @classmethod
    def of(
        cls, accepted: Accepted, text: str | None, vocabulary: Vocabulary, *, logprobs: bool
    ) -> Self:
        """Return the echo of an accepted prompt.

        Args:
            accepted: The engine's answer to the request, with the prompt's tokens.
            text: The prompt's text; None if the prompt is token ids.
            vocabulary: The model's vocabulary.
            logprobs: Whether log-probabilities are shown.
        """
        tokens = accepted.prompt_token_ids
        shown, offsets = _place(tokens, text, vocabulary)
        if not logprobs:
            return cls(shown, None)
        # The first token has no log-probability: nothing precedes it.
        prompt_columns = columns(accepted.prompt_logprobs, vocabulary)
        return cls(
            shown,
            {
                "tokens": [vocabulary.token(token_id).name for token_id in tokens],
                "token_logprobs": [None, *prompt_columns["token_logprobs"]],
                "top_logprobs": [None, *prompt_columns["top_logprobs"]],
                "text_offset": offsets,
            },
        )


def columns(logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary) -> Columns:
    """Return the columns of tokens, except their offsets."""
    return {
        "tokens": [vocabulary.token(one.token_id).name for one in logprobs],
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": [_top(one, vocabulary) for one in logprobs],
    }


def _top(one: TokenLogprob, vocabulary: Vocabulary) -> dict[str, float]:
    """Return the most likely tokens at a position, and the token itself."""
    token_name = vocabulary.token(one.token_id).name
    shown: dict[str, float] = {}
    pairs = [(top.token_id, top.logprob) for top in one.top]
    if one.token_id not in dict(pairs):
        pairs.append((one.token_id, one.logprob))
    for token_id, logprob in pairs:
        name = vocabulary.token(token_id).name
        # Tokens may share a text, such as a special token and its spelling in ordinary ones.
        if token_id != one.token_id and (name == token_name or name in shown):
            name = f"token_id:{token_id}"
        shown[name] = finite(logprob)
    return shown


def _place(
    tokens: Sequence[int], plain_text: str | None, vocabulary: Vocabulary
) -> tuple[str, list[int]]:
    """Return a prompt's text, and each token's offset in it.

    Special tokens that the tokenizer added are not in the text and have no width.
    """
    pieces = vocabulary.pieces
    detokenizer = Detokenizer(pieces, keep_special=plain_text is None)
    text, end, offsets = [], 0, []
    for token_id in tokens:
        offsets.append(end)
        shown = detokenizer.feed(token_id)
        special = pieces.special_text(token_id) if plain_text is not None else ""
        if special and plain_text is not None and plain_text.startswith(special, end):
            shown += special
        text.append(shown)
        end += len(shown)
    whole = "".join(text) + detokenizer.flush() if plain_text is None else plain_text
    return whole, [min(offset, len(whole)) for offset in offsets]
