"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from octavo.router.http.layout import Choice, Reason, finish_reason, finite
from octavo.router.http.vocabulary import Vocabulary
from octavo.v1.generation_pb2 import Accepted
from octavo.v1.sampling_pb2 import TokenLogprob


class ChatLayout:
    """Messages, and their pieces.

    Args:
        logprobs: Whether they come with log-probabilities.
    """

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, *, logprobs: bool) -> None:
        self._logprobs = logprobs

    def opening(self, index: int) -> Choice:
        """Return the choice that begins a stream's output: whose words they are."""
        return _chunk(index, {"role": "assistant", "content": ""})

    def accept(
        self,
        indices: Sequence[int],  # noqa: ARG002
        accepted: Accepted,  # noqa: ARG002
        prompt: str | None,  # noqa: ARG002
        vocabulary: Vocabulary,  # noqa: ARG002
    ) -> list[Choice]:
        """Return nothing: a chat's messages are not repeated."""
        return []

    def piece(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Choice:
        """Return the choice of a chunk with text."""
        choice = _chunk(index, {"content": text})
        if self._logprobs:
            choice["logprobs"] = _chat_logprobs(logprobs, vocabulary)
        return choice

    def ending(self, index: int, reason: Reason) -> Choice:
        """Return the choice of the chunk that ends an output."""
        return _chunk(index, {}, finish_reason(reason))

    def whole(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob],
        reason: Reason,
        vocabulary: Vocabulary,
    ) -> Choice:
        """Return the choice of a whole output."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": _chat_logprobs(logprobs, vocabulary) if self._logprobs else None,
            "finish_reason": finish_reason(reason),
        }


def _chunk(index: int, delta: dict[str, str], reason: str | None = None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _chat_logprobs(logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = vocabulary.token(token_id)
        return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.encoded)}

    content = [
        entry(one.token_id, one.logprob)
        | {"top_logprobs": [entry(top.token_id, top.logprob) for top in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}
