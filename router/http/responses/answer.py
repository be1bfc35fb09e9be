"""Answers of /v1/responses."""

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from octavo.router.http.answers import Vocabularies
from octavo.router.http.blocks import Block, BlockAnswer, Event
from octavo.router.http.chat import chat_logprobs
from octavo.router.http.conversation import seal
from octavo.router.http.errors import ApiError
from octavo.router.http.responses.schema import SEALED, ResponsesRequest
from octavo.v1.sampling_pb2 import FINISH_REASON_LENGTH, TokenLogprob

Keep = Callable[[dict[str, Any]], Awaitable[None]]
"""Stores a complete response."""

_DEFAULTS: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Members of the request that the response repeats, with their defaults."""
_INCOMPLETE = {"reason": "max_output_tokens"}


class ResponseAnswer(BlockAnswer):
    """The response to a request.

    Args:
        request: The body of the HTTP request, after the input of earlier responses.
        vocabularies: Models' vocabularies, to spell the tokens of log-probabilities.
        request_id: Id of the HTTP request.
        keep: Stores the complete response, if it is to be stored.

    Raises:
        ApiError: An argument has the wrong type.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        vocabularies: Vocabularies,
        request_id: str,
        keep: Keep | None,
    ) -> None:
        super().__init__(request, "resp_", request_id, model=request.model)
        self._offered = request.offered
        self._sealed = SEALED in (request.include or ())
        self._vocabularies = vocabularies
        self._keep = keep
        self._created = int(time.time())
        self._events_made = 0
        given = request.model_dump(
            mode="json", by_alias=True, exclude_unset=True, include=set(_DEFAULTS)
        )
        self._repeated = _DEFAULTS | {name: one for name, one in given.items() if one is not None}

    async def complete(self) -> None:
        """Store the response."""
        if self._keep is not None:
            await self._keep(self.body())

    def shown(self, logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Return the log-probabilities without the token that ended the output."""
        if not logprobs:
            return ()
        ending = self._vocabularies(self.model).eos_token_ids
        return [one for one in logprobs if one.token_id not in ending]

    def body(self) -> dict[str, Any]:
        """Return the response."""
        return self._response(self._status)

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        described = error.body["error"]
        code, message = described["code"] or described["type"], described["message"]
        if not self._events_made:
            members = {"code": code, "message": message, "param": described["param"]}
            return self.encoded(self._event("error", **members))
        response = self._response("failed") | {"error": {"code": code, "message": message}}
        return self.encoded(self._event("response.failed", response=response))

    def opening(self) -> Iterator[Event]:
        """Return the first events."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self.body())

    def opened(self, block: Block) -> Iterator[Event]:
        """Return the events that begin an item."""
        item = self._item(block, "in_progress")
        if block.kind != "call":
            item["content"] = []
        yield self._of("response.output_item.added", block, item=item)
        if block.kind != "call":
            part = self._part(block)
            yield self._of("response.content_part.added", block, content_index=0, part=part)

    def piece(self, block: Block, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[Event]:
        """Return the event of the next piece of an item; a custom tool's input comes whole."""
        if block.kind != "call":
            shown = self._logprobs(logprobs) if block.kind == "text" else {}
            name = _text_name(block)
            yield self._of(f"{name}.delta", block, content_index=0, delta=text, **shown)
        elif not self._is_custom(block):
            yield self._of("response.function_call_arguments.delta", block, delta=text)

    def closed(self, block: Block) -> Iterator[Event]:
        """Return the events that end an item."""
        if block.kind != "call":
            part, shown = self._part(block), {}
            if block.kind == "text":
                shown = {"logprobs": part["logprobs"]}
            name = _text_name(block)
            yield self._of(f"{name}.done", block, content_index=0, text=block.text, **shown)
            yield self._of("response.content_part.done", block, content_index=0, part=part)
        elif self._is_custom(block):
            name, text = "response.custom_tool_call_input", _input(block.text)
            yield self._of(f"{name}.delta", block, delta=text)
            yield self._of(f"{name}.done", block, input=text)
        else:
            call = {"name": self._names(block)["name"], "arguments": block.text}
            yield self._of("response.function_call_arguments.done", block, **call)
        item = self._item(block, "completed")
        yield self._of("response.output_item.done", block, item=item)

    def ending(self) -> Iterator[Event]:
        """Return the last event."""
        yield self._event(f"response.{self._status}", response=self.body())

    @property
    def _status(self) -> str:
        if self.finished is None:
            return "in_progress"
        return "incomplete" if self.finished.reason == FINISH_REASON_LENGTH else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        used, ended = self.usage, self.finished is not None
        last = len(self.blocks) - 1
        errors = [] if self.finished is None else list(self.finished.schema_errors)
        output = [
            self._item(block, status if block.index == last else "completed")
            for block in self.blocks
        ]
        usage = {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": used.output_tokens,
            "output_tokens_details": {"reasoning_tokens": used.reasoning_tokens},
            "total_tokens": used.prompt_tokens + used.output_tokens,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": _INCOMPLETE if status == "incomplete" else None,
            "model": self.model,
            "output": output,
            "background": False,
            "service_tier": "default",
            "usage": usage if ended else None,
            **self._repeated,
            **({"schema_errors": errors} if errors else {}),
        }

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        status = "incomplete" if status == "failed" else status
        if block.kind == "reasoning":
            item: dict[str, Any] = {"type": "reasoning", "summary": []}
            item["content"] = [self._part(block)]
            item["encrypted_content"] = seal(block.text) if self._sealed else None
        elif block.kind == "text":
            item = {"type": "message", "role": "assistant", "content": [self._part(block)]}
        else:
            item = {"call_id": block.id, **self._names(block)}
            if self._is_custom(block):
                item |= {"type": "custom_tool_call", "input": _input(block.text)}
            else:
                item |= {"type": "function_call", "arguments": block.text}
        return {"id": self._item_id(block), **item, "status": status}

    def _item_id(self, block: Block) -> str:
        prefix = {"reasoning": "rs", "text": "msg", "call": "fc"}[block.kind]
        prefix = "ctc" if self._is_custom(block) else prefix
        return f"{prefix}_{self.id.removeprefix('resp_')}_{block.index}"

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        shown = self._logprobs(block.logprobs)
        return {"type": "output_text", "text": block.text, "annotations": [], **shown}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        if not logprobs:
            return {"logprobs": []}
        return {"logprobs": chat_logprobs(logprobs, self._vocabularies(self.model))["content"]}

    def _names(self, block: Block) -> dict[str, Any]:
        """Return a called tool's name as the client has it."""
        offered = self._offered.get(block.name)
        if offered is None:
            return {"name": block.name}
        named = {"namespace": offered.namespace} if offered.namespace else {}
        return {"name": offered.tool.name, **named}

    def _is_custom(self, block: Block) -> bool:
        return block.name in self._offered and self._offered[block.name].tool.type == "custom"

    def _of(self, kind: str, block: Block, /, **members: object) -> Event:
        """Return an event about an item."""
        place: dict[str, Any] = {"output_index": block.index}
        if "item" not in members:
            place["item_id"] = self._item_id(block)
        return self._event(kind, **place, **members)

    def _event(self, kind: str, /, **members: object) -> Event:
        number, self._events_made = self._events_made, self._events_made + 1
        return {"type": kind, "sequence_number": number, **members}


def _text_name(block: Block) -> str:
    return f"response.{'output' if block.kind == 'text' else 'reasoning'}_text"


def _input(arguments: str) -> str:
    """Return a custom tool's input from the arguments of the call."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return arguments
    text = value.get("input", "") if isinstance(value, dict) else value
    return text if isinstance(text, str) else arguments
