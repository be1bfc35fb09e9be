"""Answers of /v1/messages."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from octavo.router.http.anthropic.schema import MessagesRequest
from octavo.router.http.blocks import Block, BlockAnswer, Event
from octavo.router.http.calls import event
from octavo.router.http.conversation import seal
from octavo.router.http.errors import MESSAGES_ID, ApiError
from octavo.v1.generation_pb2 import Finished
from octavo.v1.sampling_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP_STRING,
    FINISH_REASON_TOOL_CALLS,
    TokenLogprob,
)

PING: Event = {"type": "ping"}


class MessageAnswer(BlockAnswer):
    """The message that answers a request.

    Args:
        request: The body of the HTTP request.
        request_id: Id of the HTTP request.

    Raises:
        ApiError: An argument has the wrong type.
    """

    def __init__(self, request: MessagesRequest, request_id: str) -> None:
        shown = request.shows_reasoning
        super().__init__(request, "msg_", request_id, model=request.model, reasoning=shown)
        self._request = request

    @property
    def ping(self) -> bytes:
        """The API's own event."""
        return event(PING, "ping")

    @property
    def headers(self) -> dict[str, str]:
        """The id as the API names it."""
        return {MESSAGES_ID: self.id}

    def body(self) -> dict[str, Any]:
        """Return the message."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [self._content(block) for block in self.blocks],
            **self._stop(),
            "usage": self._usage(),
            **self._notes(),
        }

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        return event(error.messages_body(self.id), "error")

    def opening(self) -> Iterator[Event]:
        """Return the first events."""
        yield {"type": "message_start", "message": self.body()}
        yield PING

    def opened(self, block: Block) -> Iterator[Event]:
        """Return the event that begins a block."""
        content = self._content(block)
        if block.kind == "call":
            content["input"] = {}
        yield {"type": "content_block_start", "index": block.index, "content_block": content}

    def piece(
        self,
        block: Block,
        text: str,
        logprobs: Sequence[TokenLogprob],  # noqa: ARG002 - the API has none
    ) -> Iterator[Event]:
        """Return the event of the next piece of a block."""
        match block.kind:
            case "text":
                yield _delta(block, "text_delta", text=text)
            case "reasoning" if not self._request.omits_reasoning:
                yield _delta(block, "thinking_delta", thinking=text)
            case "call" if block.name in self._request.eager_tools:
                yield _delta(block, "input_json_delta", partial_json=text)

    def closed(self, block: Block) -> Iterator[Event]:
        """Return the events that end a block.

        A call's input comes here, as the API promises valid JSON.
        """
        if block.kind == "reasoning":
            yield _delta(block, "signature_delta", signature=seal(block.text))
        elif block.kind == "call" and block.name not in self._request.eager_tools:
            text = json.dumps(block.arguments, ensure_ascii=False)
            yield _delta(block, "input_json_delta", partial_json=text)
        yield {"type": "content_block_stop", "index": block.index}

    def ending(self) -> Iterator[Event]:
        """Return the last events."""
        delta = {**self._stop(), **self._notes()}
        yield {"type": "message_delta", "delta": delta, "usage": self._usage()}
        yield {"type": "message_stop"}

    def _content(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text}
            case "reasoning":
                shown = "" if self._request.omits_reasoning else block.text
                sealed = seal(block.text) if block.text else ""
                return {"type": "thinking", "thinking": shown, "signature": sealed}
        named = {"id": block.id, "name": block.name}
        return {"type": "tool_use", **named, "input": block.arguments}

    def _stop(self) -> dict[str, Any]:
        """Return why the output ended; nulls while it has not."""
        if self.finished is None:
            return {"stop_reason": None, "stop_sequence": None}
        stopped = self.finished.reason == FINISH_REASON_STOP_STRING
        return {
            "stop_reason": self._reason(self.finished),
            "stop_sequence": self.finished.stop_string if stopped else None,
        }

    def _reason(self, finished: Finished) -> str:
        match finished.reason:
            case reason if reason == FINISH_REASON_TOOL_CALLS:
                return "tool_use"
            case reason if reason == FINISH_REASON_STOP_STRING:
                return "stop_sequence"
            case reason if reason == FINISH_REASON_LENGTH:
                full = self.usage.output_tokens < self._request.max_tokens
                return "model_context_window_exceeded" if full else "max_tokens"
        return "end_turn"

    def _usage(self) -> dict[str, Any]:
        """Return the token counts; tokens read from the cache are no input tokens."""
        used = self.usage
        return {
            "input_tokens": used.prompt_tokens - used.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": used.cached_tokens,
            "output_tokens": used.output_tokens,
            "output_tokens_details": {"thinking_tokens": used.reasoning_tokens},
        }

    def _notes(self) -> dict[str, Any]:
        """Return the output's schema violations, if any."""
        errors = [] if self.finished is None else list(self.finished.schema_errors)
        return {"schema_errors": errors} if errors else {}


def _delta(block: Block, kind: str, **members: str) -> Event:
    delta = {"type": kind, **members}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}
