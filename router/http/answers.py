"""From a valid request to its answer, whole or streamed."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from pydantic_core import to_json

from octavo.client import Accepted, AsyncStream, Delta, Error, Event, Finished, TokenLogprob, Usage
from octavo.common.background import joined
from octavo.router.http.errors import ApiError, from_client
from octavo.router.http.layout import Choice, Layout, usage
from octavo.router.http.loopback_client import Link, Metadata
from octavo.router.http.schema import ApiRequest
from octavo.router.http.vocabulary import Vocabulary

Vocabularies = Callable[[str], Vocabulary]
"""Returns a model's vocabulary."""

END = b"data: [DONE]\n\n"


class Answer:
    """The Generate calls of one request, and what is made of what they say.

    Leaving it as a context cancels what still runs.

    Args:
        request: What was asked.
        layout: How it is answered.
        vocabularies: For log-probabilities.

    Attributes:
        id: The answer's id; calls are named by it in logs and traces.
    """

    def __init__(self, request: ApiRequest, layout: Layout, vocabularies: Vocabularies) -> None:
        self.id = layout.id_prefix + uuid.uuid4().hex
        self._request = request
        self._layout = layout
        self._vocabularies = vocabularies
        self._created = int(time.time())
        self._model = request.model
        self._streams: list[AsyncStream] = []
        self._events: AsyncGenerator[tuple[int, Event], None] | None = None
        self._usages: list[Usage] = [Usage() for _ in request.prompts]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels what still runs."""
        for stream in self._streams:
            stream.close()

    def start(self, link: Link, metadata: Metadata, timeout: float | None) -> None:
        """Starts the calls, one for each prompt.

        Raises:
            ApiError: An argument does not fit its type.
        """
        prompts = self._request.prompts
        options = self._request.options()
        try:
            for i, prompt in enumerate(prompts):
                options["request_id"] = self.id if len(prompts) == 1 else f"{self.id}-{i}"
                self._streams.append(link.generate(prompt, options, metadata, timeout))
        except Error as error:
            raise self._failure(error) from None

    async def whole(self) -> dict[str, Any]:
        """Returns the answer when it is complete.

        Raises:
            ApiError: A call failed.
        """
        works = [stream.complete() for stream in self._streams]
        try:
            async with joined(*works, expected=(Error,)) as tasks:
                completions = await asyncio.gather(*tasks)
        except Error as error:
            raise self._failure(error) from None
        choices = []
        vocabulary = self._vocabularies(completions[0].model)
        for i, completion in enumerate(completions):
            for output in completion.outputs[: self._request.choices]:
                index = self._index(i, output.index)
                shown = self._shown(output.logprobs, vocabulary)
                choices.append(
                    self._layout.whole(index, output.text, shown, output.reason, vocabulary)
                )
        self._model = completions[0].model
        return self._body(self._layout.object, choices) | {
            "usage": usage([completion.usage for completion in completions])
        }

    async def begin(self) -> None:
        """Waits until the first call has been admitted: from here on the answer is a stream.

        Raises:
            ApiError: It was not, or another failed.
        """
        self._events = _merge(self._streams)
        try:
            i, event = await anext(self._events)
        except Error as error:
            raise self._failure(error) from None
        assert isinstance(event, Accepted), "a call's first event"
        self._model = event.model
        self._count(i, event)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yields the answer as server-sent events; a failure is the last of them."""
        assert self._events is not None, "begun"
        vocabulary = self._vocabularies(self._model)
        for index in range(len(self._streams) * self._request.choices):
            if (opening := self._layout.opening(index)) is not None:
                yield self._chunk([opening])
        try:
            async with aclosing(self._events) as events:
                async for i, event in events:
                    self._count(i, event)
                    if (choice := self._choice(i, event, vocabulary)) is not None:
                        yield self._chunk([choice])
        except Error as error:
            yield _event(self._failure(error).body)
            return
        options = self._request.stream_options
        if options is not None and options.include_usage:
            yield self._chunk([], last=True)
        yield END

    def _choice(self, i: int, event: Event, vocabulary: Vocabulary) -> Choice | None:
        match event:
            case Delta():
                shown = self._shown(event.logprobs, vocabulary)
                if event.text or shown:
                    index = self._index(i, event.index)
                    return self._layout.piece(index, event.text, shown, vocabulary)
            case Finished():
                return self._layout.ending(self._index(i, event.index), event.reason)
        return None

    def _count(self, i: int, event: Event) -> None:
        """Keeps the sum of what call `i` has used."""
        used = self._usages[i]
        match event:
            case Accepted():
                used = replace(
                    used, prompt_tokens=event.prompt_tokens, cached_tokens=event.cached_tokens
                )
            case Delta() if self._request.usage_chunks:
                used = replace(used, output_tokens=used.output_tokens + len(event.token_ids))
            case Finished() if not self._request.usage_chunks:
                tokens = used.output_tokens + event.usage.output_tokens
                used = replace(used, output_tokens=tokens)
        self._usages[i] = used

    def _index(self, i: int, output: int) -> int:
        """Returns the number among all choices of an output of call `i`."""
        return i * self._request.choices + output

    def _shown(
        self, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Sequence[TokenLogprob]:
        """Leaves out the token that ended the output, which is no part of its text."""
        ending = set(self._request.stop_token_ids or ())
        if not self._request.ignore_eos:
            ending |= vocabulary.eos_token_ids
        return [one for one in logprobs if one.token_id not in ending]

    def _chunk(self, choices: list[Choice], *, last: bool = False) -> bytes:
        body = self._body(self._layout.chunk_object, choices)
        options = self._request.stream_options
        if last or self._request.usage_chunks:
            body["usage"] = usage(self._usages)
        elif options is not None and options.include_usage:
            body["usage"] = None
        return _event(body)

    def _body(self, kind: str, choices: list[Choice]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _failure(self, error: Error) -> ApiError:
        return from_client(error, self._request.params)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"


async def _merge(streams: Sequence[AsyncStream]) -> AsyncGenerator[tuple[int, Event], None]:
    """Yields what all streams say, and which one said it, until all have ended.

    Raises:
        Error: A call failed.
    """
    if len(streams) == 1:  # as it mostly is: no queue between
        async with aclosing(streams[0].events()) as events:
            async for event in events:
                yield 0, event
        return
    # No stream is read further ahead than by one event while the reader is slow.
    queue: asyncio.Queue[tuple[int, Event | Exception | None]] = asyncio.Queue(1)

    async def read(i: int, stream: AsyncStream) -> None:
        try:
            async for event in stream.events():
                await queue.put((i, event))
            await queue.put((i, None))
        except Exception as error:  # noqa: BLE001 - raised below
            await queue.put((i, error))

    async with joined(*(read(i, stream) for i, stream in enumerate(streams))):
        running = len(streams)
        while running:
            i, news = await queue.get()
            if isinstance(news, Exception):
                raise news
            if news is None:
                running -= 1
            else:
                yield i, news
