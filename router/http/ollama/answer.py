"""Answers of /api/chat and /api/generate: JSON objects, one a line."""

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic_core import to_json

from octavo.router.http.blocks import Block, BlockAnswer, Event
from octavo.router.http.errors import ApiError
from octavo.router.http.ollama.schema import ChatBody, GenerateBody
from octavo.v1.sampling_pb2 import FINISH_REASON_LENGTH, TokenLogprob


class OllamaAnswer(BlockAnswer):
    """The answer of a request; `done` is true in its last object.

    Args:
        request: The body of the HTTP request.
        request_id: Id of the HTTP request.

    Raises:
        ApiError: An argument has the wrong type.
    """

    media_type = "application/x-ndjson"

    def __init__(self, request: ChatBody | GenerateBody, request_id: str) -> None:
        shown = request.think is not False
        super().__init__(request, "", request_id, model=request.model, reasoning=shown)
        self._chat = isinstance(request, ChatBody)
        self._began = time.monotonic_ns()
        self._first = 0

    @property
    def ping(self) -> bytes:
        """An object without text: clients parse every line."""
        return self.encoded(self._object(""))

    def encoded(self, one: Event) -> bytes:
        """Return an object as a line."""
        return to_json(one) + b"\n"

    def failure(self, error: ApiError) -> bytes:
        """Return the last line of a stream that failed."""
        return self.encoded(error.ollama_body)

    def body(self) -> dict[str, Any]:
        """Return the whole answer."""
        texts = {"reasoning": "", "text": ""}
        calls: list[dict[str, Any]] = []
        for block in self.blocks:
            if block.kind == "call":
                calls.append(_call(len(calls), block))
            else:
                texts[block.kind] += block.text
        whole = self._object(texts["text"], texts["reasoning"], calls)
        return whole | self._ending()

    def opening(self) -> Iterator[Event]:
        """Return no event: the first object has text."""
        yield from ()

    def opened(self, block: Block) -> Iterator[Event]:  # noqa: ARG002
        """Return no event; note the time of the first."""
        self._first = self._first or time.monotonic_ns()
        yield from ()

    def piece(
        self,
        block: Block,
        text: str,
        logprobs: Sequence[TokenLogprob],  # noqa: ARG002
    ) -> Iterator[Event]:
        """Return the object of the next piece of text or reasoning."""
        if block.kind == "text":
            yield self._object(text)
        elif block.kind == "reasoning":
            yield self._object("", text)

    def closed(self, block: Block) -> Iterator[Event]:
        """Return the object of a call, which has its arguments whole."""
        if block.kind == "call":
            number = sum(other.kind == "call" for other in self.blocks) - 1
            yield self._object("", calls=[_call(number, block)])

    def ending(self) -> Iterator[Event]:
        """Return the last object."""
        yield self._object("") | self._ending()

    def _object(
        self, text: str, thinking: str = "", calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        head = {"model": self.model, "created_at": now()}
        extra: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._chat:
            return {**head, "response": text, **extra, "done": False}
        if calls:
            extra["tool_calls"] = list(calls)
        message = {"role": "assistant", "content": text, **extra}
        return {**head, "message": message, "done": False}

    def _ending(self) -> dict[str, Any]:
        """Return the members of the last object: why it ended, tokens, and nanoseconds."""
        end = time.monotonic_ns()
        first = self._first or end
        cut = self.finished is not None and self.finished.reason == FINISH_REASON_LENGTH
        return {
            "done": True,
            "done_reason": "length" if cut else "stop",
            "total_duration": end - self._began,
            "load_duration": 0,
            "prompt_eval_count": self.usage.prompt_tokens,
            "prompt_eval_duration": first - self._began,
            "eval_count": self.usage.output_tokens,
            "eval_duration": end - first,
        }


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _call(number: int, block: Block) -> dict[str, Any]:
    function = {"index": number, "name": block.name, "arguments": block.arguments}
    return {"id": block.id, "function": function}
