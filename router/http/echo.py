"""The prompt as /v1/completions shows it before an output, if `echo` is set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from octavo.router.http.answer_format import finite
from octavo.router.http.vocabulary import Vocabulary
from octavo.router.text.detokenizer import Detokenizer
from octavo.v1.generation_pb2 import Accepted
from octavo.v1.sampling_pb2 import TokenLogprob

Columns = dict[str, list[Any]]
"""Log-probabilities of tokens in OpenAI's older form: a list for each property."""


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt's text, and the columns of its tokens' log-probabilities.

    Attributes:
        text: The prompt's text.
        columns: Log-probabilities of its tokens; None: not asked for.
    """

    text: str
    columns: Columns | None

    @classmethod
    def of(
        cls, accepted: Accepted, text: str | None, vocabulary: Vocabulary, *, logprobs: bool
    ) -> Self:
        """Return the echo of an accepted prompt.

        Args:
            accepted: The answer to its request, with the prompt's tokens.
            text: The prompt's text; None: it was given in tokens.
            vocabulary: The model's vocabulary.
            logprobs: Whether log-probabilities are shown.
        """
        tokens = accepted.prompt_token_ids
        shown, offsets = _place(tokens, text, vocabulary)
        if not logprobs:
            return cls(shown, None)
        # The model says nothing of the first token.
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
    """Return the columns of tokens, all but their offsets."""
    return {
        "tokens": [vocabulary.token(one.token_id).name for one in logprobs],
        "token_logprobs": [finite(one.logprob) for one in logprobs],
        "top_logprobs": [_top(one, vocabulary) for one in logprobs],
    }


def _top(one: TokenLogprob, vocabulary: Vocabulary) -> dict[str, float]:
    """Return the most likely tokens at a token's place, and the token itself."""
    token_name = vocabulary.token(one.token_id).name
    shown: dict[str, float] = {}
    pairs = [(top.token_id, top.logprob) for top in one.top]
    if one.token_id not in dict(pairs):
        pairs.append((one.token_id, one.logprob))
    for token_id, logprob in pairs:
        name = vocabulary.token(token_id).name
        # Tokens may share one text, such as a special one and what is spelt like it.
        if token_id != one.token_id and (name == token_name or name in shown):
            name = f"token_id:{token_id}"
        shown[name] = finite(logprob)
    return shown


def _place(
    tokens: Sequence[int], plain_text: str | None, vocabulary: Vocabulary
) -> tuple[str, list[int]]:
    """Return a prompt's text, and where in it each token begins.

    Special tokens that the tokenizer has added to a text are not in it, and take no place there.
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
