"""The format of an API's answers: the common part of chat and completions."""

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from octavo.router.http.vocabulary import Vocabulary
from octavo.v1.generation_pb2 import Accepted, Delta, Usage
from octavo.v1.sampling_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_TOOL_CALLS,
    FinishReason,
    TokenLogprob,
)

Reason: TypeAlias = "FinishReason.ValueType"
Choice = dict[str, Any]
"""One entry of `choices`, to be made JSON of."""

_REASONS = {FINISH_REASON_LENGTH: "length", FINISH_REASON_TOOL_CALLS: "tool_calls"}

NO_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have, as OpenAI's API does."""


class AnswerFormat(Protocol):
    """Makes the choices of one HTTP request's answer; may remember what it has shown.

    Attributes:
        id_prefix: Beginning of the answer's id.
        object: Name of a whole answer.
        chunk_object: Name of a stream's chunk.
    """

    id_prefix: str
    object: str
    chunk_object: str

    def opening(self, index: int) -> Choice | None:
        """Return the choice that begins a stream's output, if one does."""

    def accept(
        self, indices: Sequence[int], accepted: Accepted, prompt: str | None, vocabulary: Vocabulary
    ) -> list[Choice]:
        """Take an accepted prompt; return the choices of chunks that show it, if any do.

        Args:
            indices: Indices of the prompt's outputs.
            accepted: The answer to its request.
            prompt: Its text; None: it was no plain text.
            vocabulary: The model's vocabulary.
        """

    def piece(
        self, index: int, delta: Delta, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Choice | None:
        """Return the choice of a chunk with a piece of an output; None: it is not shown.

        Args:
            index: The output's index.
            delta: The piece.
            logprobs: The log-probabilities to show.
            vocabulary: The model's vocabulary.
        """

    def ending(self, index: int, reason: Reason) -> Choice:
        """Return the choice of the chunk that ends an output."""

    def whole(
        self,
        index: int,
        delta: Delta,
        logprobs: Sequence[TokenLogprob],
        reason: Reason,
        vocabulary: Vocabulary,
    ) -> Choice:
        """Return the choice of a whole output, which came as one delta."""


def finish_reason(reason: Reason) -> str:
    """Return OpenAI's word for why an output ended."""
    return _REASONS.get(reason, "stop")


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can hold."""
    return max(logprob, NO_LOGPROB)


def usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return OpenAI's form of what the Generate calls of a request used together."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    output = sum(usage.output_tokens for usage in usages)
    drafted = sum(usage.drafted_tokens for usage in usages)
    accepted = sum(usage.accepted_tokens for usage in usages)
    drafts = {"drafted_tokens": drafted, "accepted_tokens": accepted} if drafted else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in usages)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(usage.reasoning_tokens for usage in usages),
            **drafts,
        },
    }
