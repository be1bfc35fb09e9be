"""Answers of one output, laid out as the blocks of reasoning, text and calls that it has."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from octavo.router.http.calls import Calls, Generate, GeneratingBody, Send, event
from octavo.v1.generation_pb2 import Accepted, Delta, Finished, GenerateResponse, Usage
from octavo.v1.sampling_pb2 import TokenLogprob

Event = dict[str, Any]
"""A server-sent event, with its name as `type`."""


@dataclass(slots=True)
class Block:
    """A part of an output.

    Attributes:
        index: Place among the output's blocks, from 0.
        kind: What it is; a call's text is its arguments.
        id: Id of a call.
        name: Name of the called tool.
        pieces: The text, in pieces.
        logprobs: Log-probabilities of the text's tokens, if they are asked for.
    """

    index: int
    kind: Literal["reasoning", "text", "call"]
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> dict[str, Any]:
        """A call's arguments as an object.

        Those of a truncated output are closed; what is no object becomes the only value of one.
        """
        try:
            arguments = from_json(self.text or "{}", allow_partial="trailing-strings")
        except ValueError:
            arguments = None
        return arguments if isinstance(arguments, dict) else {"arguments": self.text}


class BlockAnswer(Calls):
    """An answer of one output whose API shows it as a list of blocks.

    White space alone makes no text block: models write it between reasoning and calls.

    Args:
        request: The body of the HTTP request.
        id_prefix: Prefix of the response's id.
        request_id: Id of the HTTP request.
        model: The model's name, until the real one is known.
        reasoning: Whether reasoning is shown.

    Raises:
        ApiError: An argument has the wrong type.
    """

    def __init__(
        self,
        request: GeneratingBody,
        id_prefix: str,
        request_id: str,
        *,
        model: str,
        reasoning: bool = True,
    ) -> None:
        super().__init__(request, id_prefix, request_id)
        self.model = model
        self.blocks: list[Block] = []
        self.usage = Usage()
        self.finished: Finished | None = None
        self._reasoning = reasoning
        self._open: Block | None = None
        self._space = ""

    async def whole(self, generate: Generate) -> dict[str, Any]:
        """Return the complete response.

        Raises:
            ApiError: The call failed.
        """

        async def write(response: GenerateResponse) -> None:
            for _ in self._events(response):
                pass
            if self.finished is not None:
                await self.complete()

        await self._run(generate, [write])
        return self.body()

    async def stream(self, generate: Generate, send: Send) -> None:
        """Send the response as server-sent events.

        Raises:
            ApiError: The call failed.
        """

        async def write(response: GenerateResponse) -> None:
            parts = [self.encoded(one) for one in self._events(response)]
            if self.finished is not None:
                await self.complete()
            if parts:
                await send(b"".join(parts))

        await self._run(generate, [write])

    async def complete(self) -> None:
        """Do what must be done before the client knows that the response is complete."""

    def encoded(self, one: Event) -> bytes:
        """Return an event as it is sent."""
        return event(one, one["type"])

    def shown(self, logprobs: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Return the log-probabilities to show."""
        return logprobs

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the response's JSON, with what there is so far."""

    @abstractmethod
    def opening(self) -> Iterable[Event]:
        """Return the first events."""

    @abstractmethod
    def opened(self, block: Block) -> Iterable[Event]:
        """Return the events that begin a block."""

    @abstractmethod
    def piece(self, block: Block, text: str, logprobs: Sequence[TokenLogprob]) -> Iterable[Event]:
        """Return the events of the next piece of a block."""

    @abstractmethod
    def closed(self, block: Block) -> Iterable[Event]:
        """Return the events that end a block."""

    @abstractmethod
    def ending(self) -> Iterable[Event]:
        """Return the last events."""

    def _events(self, response: GenerateResponse) -> Iterator[Event]:
        match response.WhichOneof("event"):
            case "accepted":
                yield from self._accept(response.accepted)
            case "delta":
                yield from self._add(response.delta)
            case "finished":
                yield from self._close()
                self.finished = response.finished
                self.usage = response.finished.usage
                yield from self.ending()

    def _accept(self, accepted: Accepted) -> Iterable[Event]:
        self.model = accepted.model
        self.usage.prompt_tokens = accepted.prompt_tokens
        self.usage.cached_tokens = accepted.cached_tokens
        return self.opening()

    def _add(self, delta: Delta) -> Iterator[Event]:
        if delta.reasoning and self._reasoning:
            yield from self._write("reasoning", delta.reasoning)
        text, logprobs = self._space + delta.text, self.shown(delta.logprobs)
        inside = self._open is not None and self._open.kind == "text"
        self._space = "" if inside or logprobs or text.strip() else text
        if (text or logprobs) and not self._space:
            yield from self._write("text", text, logprobs)
        for call in delta.tool_calls:
            self._space = ""
            if call.id:
                yield from self._begin(Block(len(self.blocks), "call", call.id, call.name))
            yield from self._write("call", call.arguments)

    def _write(
        self,
        kind: Literal["reasoning", "text", "call"],
        text: str,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Iterator[Event]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Block(len(self.blocks), kind))
        assert self._open is not None
        if text or logprobs:
            self._open.pieces.append(text)
            self._open.logprobs.extend(logprobs)
            yield from self.piece(self._open, text, logprobs)

    def _begin(self, block: Block) -> Iterator[Event]:
        yield from self._close()
        self._open = block
        self.blocks.append(block)
        yield from self.opened(block)

    def _close(self) -> Iterator[Event]:
        if self._open is not None:
            block, self._open = self._open, None
            yield from self.closed(block)
