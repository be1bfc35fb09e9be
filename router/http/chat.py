"""Answers of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from octavo.client import ToolCall
from octavo.client.responses import tool_calls
from octavo.router.http.answer_format import AnswerFormat, Choice, Reason, finish_reason, finite
from octavo.router.http.schema import ChatRequest
from octavo.router.http.vocabulary import Vocabulary
from octavo.v1.generation_pb2 import Accepted, Delta, ToolCallDelta
from octavo.v1.sampling_pb2 import TokenLogprob


class ChatFormat(AnswerFormat):
    """The response format of chat completions.

    Args:
        request: The body of the HTTP request.
    """

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request, logprobs=bool(request.logprobs))
        self._reasoning = request.include_reasoning is not False

    def opening(self, index: int) -> Choice:
        """Return the first choice of an output's stream, with the message's role."""
        return _chunk(index, {"role": "assistant", "content": ""})

    def accept(
        self,
        indices: Sequence[int],  # noqa: ARG002
        accepted: Accepted,
        prompt: str | None,  # noqa: ARG002
        vocabulary: Vocabulary,
    ) -> list[Choice]:
        """Return nothing: chat responses do not echo the prompt."""
        self.members = self._prompt_report(accepted, vocabulary)
        return []

    def piece(
        self, index: int, delta: Delta, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Choice | None:
        """Return the choice of a chunk with one delta; None if the delta is empty."""
        piece: dict[str, Any] = self._shown_reasoning(delta)
        if delta.text or logprobs:
            piece["content"] = delta.text
        if delta.tool_calls:
            piece["tool_calls"] = [_call_piece(call) for call in delta.tool_calls]
        if not (piece or (self._token_ids and delta.token_ids)):
            return None
        choice = _chunk(index, piece) | self._shown_tokens(delta)
        if self._logprobs:
            choice["logprobs"] = chat_logprobs(logprobs, vocabulary)
        return choice

    def ending(self, index: int, reason: Reason) -> Choice:
        """Return the choice of an output's last chunk."""
        return _chunk(index, {}, finish_reason(reason))

    def whole(
        self,
        index: int,
        delta: Delta,
        logprobs: Sequence[TokenLogprob],
        reason: Reason,
        vocabulary: Vocabulary,
    ) -> Choice:
        """Return the choice of a whole output."""
        calls = tool_calls(delta.tool_calls)
        # Like OpenAI's: a message with tool calls alone has null content, not an empty string.
        message: dict[str, Any] = {
            "role": "assistant",
            "content": delta.text or (None if calls else ""),
            "refusal": None,
            **self._shown_reasoning(delta),
        }
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(logprobs, vocabulary) if self._logprobs else None,
            "finish_reason": finish_reason(reason),
            **self._shown_tokens(delta),
        }

    def _shown_reasoning(self, delta: Delta) -> dict[str, str]:
        """Return reasoning under DeepSeek's name, which most clients read, and vLLM's newer one."""
        if not (self._reasoning and delta.reasoning):
            return {}
        return {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_piece(piece: ToolCallDelta) -> dict[str, Any]:
    """Return a part of a tool call; only the first part has the id and the function's name."""
    if not piece.id:
        return {"index": piece.index, "function": {"arguments": piece.arguments}}
    return {"index": piece.index, **_call(ToolCall(piece.id, piece.name, piece.arguments))}


def _chunk(index: int, delta: dict[str, Any], reason: str | None = None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def chat_logprobs(logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary) -> dict[str, Any]:
    """Return log-probabilities in OpenAI's form."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token = vocabulary.token(token_id)
        return {"token": token.text, "logprob": finite(logprob), "bytes": list(token.encoded)}

    content = [
        entry(one.token_id, one.logprob)
        | {"top_logprobs": [entry(top.token_id, top.logprob) for top in one.top]}
        for one in logprobs
    ]
    return {"content": content, "refusal": None}
