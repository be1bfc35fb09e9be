"""The response format that the chat and completions APIs share."""

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
"""One entry of the response's `choices`, ready to be encoded as JSON."""

_REASONS = {FINISH_REASON_LENGTH: "length", FINISH_REASON_TOOL_CALLS: "tool_calls"}

NO_LOGPROB = -9999.0
"""Value for minus infinity, which JSON cannot express; OpenAI's API uses the same."""


class AnswerFormat(Protocol):
    """Build the choices of one HTTP response; may keep state between chunks.

    Attributes:
        id_prefix: Prefix of the response's id.
        object: The `object` member of a whole response.
        chunk_object: The `object` member of a stream's chunk.
        members: Members of a whole response and of a stream's first chunks, besides the usual.
    """

    id_prefix: str
    object: str
    chunk_object: str
    members: dict[str, Any]

    def opening(self, index: int) -> Choice | None:
        """Return the first choice of an output's stream, if the API has one."""

    def accept(
        self, indices: Sequence[int], accepted: Accepted, prompt: str | None, vocabulary: Vocabulary
    ) -> list[Choice]:
        """Handle an accepted prompt; return the choices of chunks that show it.

        Args:
            indices: Indices of the prompt's outputs.
            accepted: The engine's answer to the prompt's request.
            prompt: The prompt's text; None if the prompt is not plain text.
            vocabulary: The model's vocabulary.
        """

    def piece(
        self, index: int, delta: Delta, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Choice | None:
        """Return the choice of a chunk with one delta; None if there is nothing to show.

        Args:
            index: The output's index.
            delta: The new part of the output.
            logprobs: The log-probabilities to show.
            vocabulary: The model's vocabulary.
        """

    def ending(self, index: int, reason: Reason) -> Choice:
        """Return the choice of an output's last chunk."""

    def whole(
        self,
        index: int,
        delta: Delta,
        logprobs: Sequence[TokenLogprob],
        reason: Reason,
        vocabulary: Vocabulary,
    ) -> Choice:
        """Return the choice of a whole output, which arrives as one delta."""


def finish_reason(reason: Reason) -> str:
    """Return OpenAI's finish reason."""
    return _REASONS.get(reason, "stop")


def finite(logprob: float) -> float:
    """Return a log-probability that JSON can express."""
    return max(logprob, NO_LOGPROB)


def usage(usages: Sequence[Usage]) -> dict[str, Any]:
    """Return the total usage of a request's Generate calls, in OpenAI's form."""
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
