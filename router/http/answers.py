"""Builds the response to a valid request of chat or text completions, whole or streamed."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from octavo.router.http.answer_format import AnswerFormat, Choice, usage
from octavo.router.http.calls import Calls, Generate, Send, event
from octavo.router.http.schema import ApiRequest
from octavo.router.http.vocabulary import Vocabulary
from octavo.v1.generation_pb2 import Accepted, Delta, Finished, GenerateResponse, Usage
from octavo.v1.sampling_pb2 import TokenLogprob

Vocabularies = Callable[[str], Vocabulary]
"""A function that returns a model's vocabulary."""

END = b"data: [DONE]\n\n"


class Answer(Calls):
    """The response of chat and text completions.

    Args:
        request: The body of the HTTP request.
        answer_format: The API's response format.
        vocabularies: Models' vocabularies, to spell the tokens of log-probabilities.
        request_id: Id of the HTTP request.

    Raises:
        ApiError: An argument has the wrong type.
    """

    def __init__(
        self,
        request: ApiRequest,
        answer_format: AnswerFormat,
        vocabularies: Vocabularies,
        request_id: str,
    ) -> None:
        super().__init__(request, answer_format.id_prefix, request_id)
        self._started = False
        self._unenforced_sent = False
        self._request = request
        self._format = answer_format
        self._vocabularies = vocabularies
        self._created = int(time.time())
        self._model = request.model
        self._usages = [Usage() for _ in self._messages]
        self._sending = asyncio.Lock()

    async def whole(self, generate: Generate) -> dict[str, Any]:
        """Return the complete response.

        Raises:
            ApiError: A call failed.
        """
        responses: list[list[GenerateResponse]] = [[] for _ in self._messages]
        writes = [partial(self._keep, i, kept) for i, kept in enumerate(responses)]
        await self._run(generate, writes)
        self._model = responses[0][0].accepted.model
        vocabulary = self._vocabularies(self._model)
        choices = []
        for i, kept in enumerate(responses):
            # An output's text arrives in one Delta; an empty output has none.
            deltas = {one.delta.index: one.delta for one in kept if one.HasField("delta")}
            ends = sorted((one.finished for one in kept if one.HasField("finished")), key=_place)
            for end in ends[: self._request.choices]:
                delta = deltas.get(end.index, Delta())
                shown = self._shown(delta.logprobs, vocabulary)
                index = self._index(i, end.index)
                choice = self._format.whole(index, delta, shown, end.reason, vocabulary)
                choices.append(choice | _errors(end))
        body = self._body(self._format.object, choices) | self._format.members
        body |= {"usage": usage(self._usages)}
        return body | ({"unenforced_schema": self.unenforced} if self.unenforced else {})

    async def stream(self, generate: Generate, send: Send) -> None:
        """Send the response as server-sent events.

        Raises:
            ApiError: A call failed.
        """
        writes = [partial(self._send_response, send, i) for i in range(len(self._messages))]
        await self._run(generate, writes)
        options = self._request.stream_options
        if options is not None and options.include_usage:
            await send(self._chunk([], last=True))
        await send(END)

    async def _keep(self, i: int, kept: list[GenerateResponse], response: GenerateResponse) -> None:
        self._count(i, response)
        if response.HasField("accepted"):
            self._accept(i, response.accepted)
        kept.append(response)

    async def _send_response(self, send: Send, i: int, response: GenerateResponse) -> None:
        """Send the visible part of a response of call `i`."""
        self._count(i, response)
        async with self._sending:  # all opening chunks are sent first
            shown = self._accept(i, response.accepted) if response.HasField("accepted") else []
            if not self._started:
                self._started = True
                self._model = response.accepted.model
                for index in range(len(self._messages) * self._request.choices):
                    if (opening := self._format.opening(index)) is not None:
                        await send(self._chunk([opening], self._format.members))
            for choice in shown:
                await send(self._chunk([choice]))
            if (part := self._choice(i, response)) is not None:
                await send(self._chunk([part]))

    def _accept(self, i: int, accepted: Accepted) -> list[Choice]:
        """Return the choices that show the prompt of call `i`, if any."""
        prompt = self._messages[i].text if self._messages[i].HasField("text") else None
        indices = [self._index(i, output) for output in range(self._request.choices)]
        vocabulary = self._vocabularies(accepted.model)
        return self._format.accept(indices, accepted, prompt, vocabulary)

    def _choice(self, i: int, response: GenerateResponse) -> Choice | None:
        match response.WhichOneof("event"):
            case "delta":
                delta = response.delta
                vocabulary = self._vocabularies(self._model)
                shown = self._shown(delta.logprobs, vocabulary)
                index = self._index(i, delta.index)
                return self._format.piece(index, delta, shown, vocabulary)
            case "finished":
                finished = response.finished
                index = self._index(i, finished.index)
                return self._format.ending(index, finished.reason) | _errors(finished)
        return None

    def _count(self, i: int, response: GenerateResponse) -> None:
        """Add the token usage of a response of call `i`."""
        used = self._usages[i]
        match response.WhichOneof("event"):
            case "accepted":
                used.prompt_tokens = response.accepted.prompt_tokens
                used.cached_tokens = response.accepted.cached_tokens
            case _ if self._request.prompt_only:
                pass  # the one token that the engine had to generate is not shown
            case "delta" if self._request.usage_chunks:
                used.output_tokens += len(response.delta.token_ids)
            case "finished":
                used.reasoning_tokens += response.finished.usage.reasoning_tokens
                used.drafted_tokens += response.finished.usage.drafted_tokens
                used.accepted_tokens += response.finished.usage.accepted_tokens
                if not self._request.usage_chunks:
                    used.output_tokens += response.finished.usage.output_tokens

    def _index(self, i: int, output: int) -> int:
        """Return the index of an output of call `i` among the choices of the whole response."""
        return i * self._request.choices + output

    def _shown(
        self, logprobs: Sequence[TokenLogprob], vocabulary: Vocabulary
    ) -> Sequence[TokenLogprob]:
        """Remove the token that ended the output, unless the request asks for it."""
        if self._request.shows_ending:
            return logprobs
        if not logprobs:
            return ()
        ending = set(self._request.stop_token_ids or ())
        if not self._request.ignore_eos:
            ending |= vocabulary.eos_token_ids
        return [one for one in logprobs if one.token_id not in ending]

    def _chunk(
        self, choices: list[Choice], members: dict[str, Any] | None = None, *, last: bool = False
    ) -> bytes:
        body = self._body(self._format.chunk_object, choices) | (members or {})
        options = self._request.stream_options
        if last or self._request.usage_chunks:
            body["usage"] = usage(self._usages)
        elif options is not None and options.include_usage:
            body["usage"] = None
        if self.unenforced and not self._unenforced_sent:
            self._unenforced_sent = True
            body["unenforced_schema"] = self.unenforced
        return event(body)

    def _body(self, kind: str, choices: list[Choice]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def _errors(end: Finished) -> Choice:
    """Return an output's schema violations, as a member of its choice."""
    return {"schema_errors": list(end.schema_errors)} if end.schema_errors else {}


def _place(end: Finished) -> int:
    return end.index
