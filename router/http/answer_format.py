"""The response format that the chat and completions APIs share."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

from octavo.router.http.schema import Parameters
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


class AnswerFormat(ABC):
    """Build the choices of one HTTP response; may keep state between chunks.

    Args:
        request: The body of the HTTP request.
        logprobs: Whether responses contain log-probabilities.

    Attributes:
        id_prefix: Prefix of the response's id.
        object: The `object` member of a whole response.
        chunk_object: The `object` member of a stream's chunk.
        members: Members of a whole response and of a stream's first chunks, besides the usual.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, request: Parameters, *, logprobs: bool) -> None:
        self.members: dict[str, Any] = {}
        self._logprobs = logprobs
        self._token_ids = bool(request.return_token_ids)
        self._prompt_logprobs = request.prompt_logprobs is not None

    def _prompt_report(self, accepted: Accepted, vocabulary: Vocabulary) -> dict[str, Any]:
        """Return a prompt's tokens and their log-probabilities in the form of vLLM's API."""
        report: dict[str, Any] = {}
        if self._token_ids:
            report["prompt_token_ids"] = list(accepted.prompt_token_ids)
        if self._prompt_logprobs:
            # The first token has no log-probability: nothing precedes it.
            shown = [_prompt_logprobs(one, vocabulary) for one in accepted.prompt_logprobs]
            report["prompt_logprobs"] = [None, *shown]
        return report

    def _shown_tokens(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": list(delta.token_ids)} if self._token_ids else {}

    @abstractmethod
    def opening(self, index: int) -> Choice | None:
        """Return the first choice of an output's stream, if the API has one."""

    @abstractmethod
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

    @abstractmethod
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

    @abstractmethod
    def ending(self, index: int, reason: Reason) -> Choice:
        """Return the choice of an output's last chunk."""

    @abstractmethod
    def whole(
        self,
        index: int,
        delta: Delta,
        logprobs: Sequence[TokenLogprob],
        reason: Reason,
        vocabulary: Vocabulary,
    ) -> Choice:
        """Return the choice of a whole output, which arrives as one delta."""


def _prompt_logprobs(one: TokenLogprob, vocabulary: Vocabulary) -> dict[str, dict[str, Any]]:
    """Return a token and the most likely ones, by their ids; others have no rank."""
    ranks = {top.token_id: rank for rank, top in enumerate(one.top, 1)}
    logprobs = {one.token_id: one.logprob, **{top.token_id: top.logprob for top in one.top}}
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": vocabulary.token(token_id).text,
        }
        for token_id, logprob in logprobs.items()
    }


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
