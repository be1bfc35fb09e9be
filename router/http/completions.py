"""Answers of /v1/completions."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from octavo.router.http.layout import Choice, Reason, finish_reason, finite
from octavo.router.http.vocabulary import Vocabulary
from octavo.v1.sampling_pb2 import TokenLogprob


class CompletionLayout:
    """Texts, and their pieces.

    Args:
        logprobs: Whether they come with log-probabilities.
    """

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs
        self._offsets: defaultdict[int, int] = defaultdict(int)  # characters of tokens shown

    def opening(self, index: int) -> None:
        """Return nothing: a text begins with its first piece."""

    def piece(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Choice:
        """Return the choice of a chunk with text."""
        return self._choice(index, text, logprobs, None, vocabulary)

    def ending(self, index: int, reason: Reason) -> Choice:
        """Return the choice of the chunk that ends an output."""
        return {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": finish_reason(reason),
        }

    def whole(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob],
        reason: Reason,
        vocabulary: Vocabulary,
    ) -> Choice:
        """Return the choice of a whole output."""
        return self._choice(index, text, logprobs, finish_reason(reason), vocabulary)

    def _choice(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob],
        reason: str | None,
        vocabulary: Vocabulary,
    ) -> Choice:
        shown = self._columns(index, logprobs, vocabulary) if self._logprobs else None
        return {"index": index, "text": text, "logprobs": shown, "finish_reason": reason}

    def _columns(
        self, index: int, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> dict[str, Any]:
        texts = [vocabulary.token(one.token_id).text for one in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        top = [
            {vocabulary.token(top.token_id).text: finite(top.logprob) for top in one.top}
            for one in logprobs
        ]
        return {
            "tokens": texts,
            "token_logprobs": [finite(one.logprob) for one in logprobs],
            "top_logprobs": top,
            "text_offset": offsets,
        }
