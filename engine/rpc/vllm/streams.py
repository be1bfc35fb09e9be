"""The calls of Generate: requests of one session, each with a stream of responses."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm_pb2

from octavo.common import rpc
from octavo.engine.core import EngineCore
from octavo.engine.events import OutputEvent, PrefixChange, StepOutput
from octavo.engine.rpc.vllm.stop_strings import StopStrings
from octavo.engine.scheduling.request import FinishReason, Request
from octavo.engine.scheduling.sequence import TokenLogprob
from octavo.v1 import engine_pb2

MakeStopStrings = Callable[[], StopStrings]
FINISH_REASONS = {
    FinishReason.ABORTED: "abort",
    FinishReason.EOS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.STOP_STRING: "stop",
    FinishReason.STOP_TOKEN: "stop",
}
"""vLLM's names of finish reasons."""


@dataclass(slots=True)
class _Output:
    """An output's tokens since its last response.

    Attributes:
        token_ids: The tokens.
        logprobs: Their log-probabilities, if requested.
        finish_reason: Reason of its end; None while it runs.
        started: Whether a response was sent.
        ended: Whether the last response was sent.
        stop_strings: Its stop strings; None if it has none.
        stop_string: The stop string that ended it.
        drafted_tokens: Tokens drafted for it, from its start.
        accepted_tokens: Drafted tokens that were right.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    started: bool = False
    ended: bool = False
    stop_strings: StopStrings | None = None
    stop_string: str | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class GenerateStream:
    """One call's outputs.

    If the caller reads slowly, responses are merged, so a stream never holds more than its tokens.

    Args:
        request: The request.
        streaming: Whether tokens are sent as they come; else each output once, when it ends.
        stop_strings: Makes what watches an output for its stop strings; None if there are none.
        stop: Called with the index of an output that a stop string ended.

    Attributes:
        request: The request.
        started: Whether it has left the queue.
    """

    def __init__(
        self,
        request: Request,
        *,
        streaming: bool,
        stop_strings: MakeStopStrings | None,
        stop: Callable[[int], None],
    ) -> None:
        self.request = request
        self.started = False
        self._streaming = streaming
        self._stop = stop
        self._outputs = [
            _Output(stop_strings=stop_strings() if stop_strings else None)
            for _ in range(request.num_outputs)
        ]
        self._prompt_logprobs: list[TokenLogprob] = []
        self._cached_tokens = 0
        self._error: rpc.RpcError | None = None
        self._ready = asyncio.Event()

    def start(self, cached_tokens: int) -> None:
        """Record that the request has left the queue."""
        self.started, self._cached_tokens = True, cached_tokens

    def add_token(self, index: int, token_id: int) -> None:
        """Add a token without log-probabilities or a finish reason."""
        output = self._outputs[index]
        if output.finish_reason is not None:
            return  # it was ended here; the engine had begun the token before it knew
        output.token_ids.append(token_id)
        if output.stop_strings is not None:
            output.stop_string = output.stop_strings.find(token_id)
            if output.stop_string is not None:
                output.finish_reason = FinishReason.STOP_STRING
                self._stop(index)
        self._ready.set()

    def add(self, event: OutputEvent) -> None:
        """Add tokens with their log-probabilities and finish reason."""
        output = self._outputs[event.index]
        if output.finish_reason is not None:
            return
        if event.logprob is not None:
            output.logprobs.append(event.logprob)
        self._prompt_logprobs += event.prompt_logprobs
        output.drafted_tokens += event.drafted_tokens
        output.accepted_tokens += event.accepted_tokens
        for token_id in event.token_ids:
            self.add_token(event.index, token_id)
        if output.finish_reason is None:
            output.finish_reason = event.finish_reason
        self._ready.set()

    def abort(self) -> None:
        """End the outputs that have not ended."""
        for output in self._outputs:
            if output.finish_reason is None:
                output.finish_reason = FinishReason.ABORTED
        self._ready.set()

    def fail(self, error: rpc.RpcError) -> None:
        """End the stream with an error."""
        self._error = error
        self._ready.set()

    async def responses(self) -> AsyncIterator[vllm_pb2.GenerateResponse]:
        """Yield responses until all outputs have ended.

        Raises:
            RpcError: The request failed.
        """
        while not all(output.ended for output in self._outputs):
            await self._ready.wait()
            self._ready.clear()
            if self._error is not None:
                raise self._error
            for index, output in enumerate(self._outputs):
                for response in self._take(index, output):
                    yield response

    def _take(self, index: int, output: _Output) -> list[vllm_pb2.GenerateResponse]:
        """Return the responses for an output's new tokens, and clear these."""
        responses: list[vllm_pb2.GenerateResponse] = []
        if output.ended:
            return responses
        finished = output.finish_reason is not None
        if self._streaming and output.token_ids:
            responses.append(vllm_pb2.GenerateResponse(chunk=self._chunk(index, output)))
            output.started = True
        if finished:
            responses.append(vllm_pb2.GenerateResponse(complete=self._complete(index, output)))
            output.ended = True
        if self._streaming or finished:
            output.token_ids, output.logprobs = [], []
        return responses

    def _chunk(self, index: int, output: _Output) -> vllm_pb2.GenerateStreamChunk:
        return vllm_pb2.GenerateStreamChunk(
            token_ids=output.token_ids,
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(output.token_ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=self._output_logprobs(output),
            input_logprobs=None if output.started else self._input_logprobs(),
            index=index,
        )

    def _complete(self, index: int, output: _Output) -> vllm_pb2.GenerateComplete:
        """Return an output's last response; of a stream, it repeats the last tokens."""
        reason, tokens = output.finish_reason, output.token_ids
        assert reason is not None
        stopped = reason is FinishReason.STOP_TOKEN
        return vllm_pb2.GenerateComplete(
            output_ids=tokens,
            finish_reason=FINISH_REASONS[reason],
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(tokens),
            cached_tokens=self._cached_tokens,
            output_logprobs=self._output_logprobs(output),
            input_logprobs=self._input_logprobs(),
            index=index,
            matched_token_id=tokens[-1] if stopped else None,
            matched_stop_str=output.stop_string,
            spec_draft_tokens=output.drafted_tokens,
            spec_accepted_tokens=output.accepted_tokens,
        )

    def _output_logprobs(self, output: _Output) -> vllm_pb2.OutputLogProbs | None:
        if not output.logprobs:
            return None
        return vllm_pb2.OutputLogProbs(
            token_logprobs=[logprob.logprob for logprob in output.logprobs],
            token_ids=[logprob.token_id for logprob in output.logprobs],
            top_logprobs=_top(output.logprobs) if self.request.sampling.logprobs else (),
        )

    def _input_logprobs(self) -> vllm_pb2.InputLogProbs | None:
        """Return the prompt's log-probabilities; its first token has none."""
        if self.request.sampling.prompt_logprobs is None:
            return None
        known = self._prompt_logprobs
        top = (
            [vllm_pb2.TopLogProbs(), *_top(known)] if self.request.sampling.prompt_logprobs else ()
        )
        return vllm_pb2.InputLogProbs(
            token_logprobs=[
                vllm_pb2.InputTokenLogProb(),
                *(vllm_pb2.InputTokenLogProb(value=logprob.logprob) for logprob in known),
            ],
            token_ids=self.request.prompt,
            top_logprobs=top,
        )


def _top(logprobs: Iterable[TokenLogprob]) -> list[vllm_pb2.TopLogProbs]:
    """Return the most likely tokens at each position."""
    return [
        vllm_pb2.TopLogProbs(
            token_ids=[token_id for token_id, _ in logprob.top],
            values=[value for _, value in logprob.top],
        )
        for logprob in logprobs
    ]


class GenerateStreams:
    """All calls of Generate, as one session of the core.

    Two requests may have the same id, as in vLLM: the core gets it with a number appended.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._streams: dict[str, GenerateStream] = {}
        self._outputs: dict[int, tuple[GenerateStream, int]] = {}  # by their number
        self._next_number = 1

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of queued requests."""
        return sum(len(s.request.prompt) for s in self._streams.values() if not s.started)

    async def run(
        self, request: Request, *, streaming: bool, stop_strings: MakeStopStrings | None = None
    ) -> AsyncIterator[vllm_pb2.GenerateResponse]:
        """Yield a request's responses; abort it if the caller leaves.

        Raises:
            RpcError: The request failed.
        """
        number, count = self._next_number, request.num_outputs
        self._next_number += count
        unique = f"{request.request_id}#{number}"
        stream = GenerateStream(
            request,
            streaming=streaming,
            stop_strings=stop_strings,
            stop=lambda index: self._core.abort(request.session, unique, index),
        )
        self._streams[unique] = stream
        self._outputs |= {number + index: (stream, index) for index in range(count)}
        self._core.submit(replace(request, request_id=unique, first_number=number))
        try:
            async for response in stream.responses():
                yield response
        finally:
            self._core.abort(request.session, unique)
            del self._streams[unique]
            for index in range(count):
                del self._outputs[number + index]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests by their callers' ids; an unknown one may just have ended."""
        aborted = set(request_ids)
        for unique, stream in self._streams.items():
            if stream.request.request_id in aborted:
                self._core.abort(stream.request.session, unique)
                stream.abort()

    def add(self, output: StepOutput, load: engine_pb2.Load) -> None:  # noqa: ARG002 - polled
        """Pass a step's events to the streams; those of requests that have left are dropped."""
        streams = self._streams
        for started in output.started:
            if (stream := streams.get(started.request_id)) is not None:
                stream.start(started.cached_tokens)
        for number, token_id in zip(output.numbers, output.token_ids, strict=True):
            if number in self._outputs:
                stream, index = self._outputs[number]
                stream.add_token(index, token_id)
        for event in output.outputs:
            if (stream := streams.get(event.request_id)) is not None:
                stream.add(event)
        for failure in output.failures:
            if (stream := streams.get(failure.request_id)) is not None:
                error = rpc.RpcError.from_code(failure.code, failure.message, failure.field)
                stream.fail(error)

    def add_prefixes(self, change: PrefixChange) -> None:
        """Do nothing."""

    def set_adapters(self, adapters: engine_pb2.Adapters) -> None:
        """Do nothing: the contract has no adapters."""

    def close(self) -> None:
        """Do nothing: the core has failed the remaining requests."""

    def fail(self) -> None:
        """End all streams: events were lost."""
        lost = "the engine lost events of this request; its log has the details"
        for stream in self._streams.values():
            stream.fail(rpc.RpcError(grpc.StatusCode.INTERNAL, lost))
