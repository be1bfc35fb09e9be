"""A request in progress."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import grpc

from octavo.common import rpc
from octavo.router.metrics import ModelMetrics
from octavo.router.requests.errors import EngineLostError
from octavo.router.requests.output import STOP_STRING, Output
from octavo.router.requests.pacing import EARLY
from octavo.router.requests.request import Request
from octavo.router.tenants.quota import RequestUsage
from octavo.router.text.detokenizer import Pieces
from octavo.v1 import engine_pb2, generation_pb2, sampling_pb2


class RequestState:
    """A request's outputs so far, its attempts on engines, and the responses to send.

    It keeps all sampled tokens, so that the request can migrate: call `begin_attempt` again after
    `take` has raised `EngineLostError`. The session calls `started`, `append` and `fail`, which
    must not block.

    Args:
        request: The request.
        pieces: The model's vocabulary.
        usage: Counts the tenant's tokens.
        metrics: The model's metrics.
        message_interval: Returns the minimum seconds between two messages of a stream.
        max_unread_tokens: Maximum tokens per output that the client has not read.

    Attributes:
        request: The request.
        outputs: Outputs, by index.
        cached_tokens: Prompt tokens in the first engine's prefix cache.
        engine: Address of the last engine; empty before the first.
        queue_time: Seconds from arrival to the first engine; None before it.
        migrations: Number of migrations to another engine.
        handed_over: Whether a prefill engine has computed its prompt.
        failed_on: Engine on which a step failed, if any.
    """

    def __init__(
        self,
        request: Request,
        pieces: Pieces,
        *,
        usage: RequestUsage,
        metrics: ModelMetrics,
        message_interval: Callable[[], float],
        max_unread_tokens: int,
    ) -> None:
        message = request.message
        self.request = request
        self.outputs = [
            Output(i, pieces, message.stop, message.output, request.plan)
            for i in range(request.num_outputs)
        ]
        self.cached_tokens = 0
        self.engine = ""
        self.queue_time: float | None = None
        self.migrations = 0
        self.handed_over = False
        self.failed_on: object | None = None
        # Read once: each protobuf access creates an object, and this is used per token.
        self._final_only = message.output.final_only
        self._usage = usage
        self._metrics = metrics
        self._message_interval = message_interval
        # Whole outputs wait for their end, even if the client reads fast.
        self._max_unread = math.inf if request.whole else max_unread_tokens
        self._changed = asyncio.Event()
        self._next_message = 0.0  # earliest time of the next message
        self._timer: asyncio.TimerHandle | None = None  # sets the event if no tokens follow
        self._unfinished = len(self.outputs)
        self._error: rpc.RpcError | None = None
        self._accepted = generation_pb2.Accepted(
            request_id=request.request_id, model=request.model, prompt_tokens=len(request.prompt)
        )
        if message.output.prompt_token_ids:
            self._accepted.prompt_token_ids.extend(request.prompt)
        if request.checks is not None:
            self._accepted.unenforced.extend(request.checks.unenforced)
        self._prompt_counted = False
        self._may_accept = False  # whether Accepted is complete
        self._accepted_sent = False

    @property
    def sequences(self) -> int:
        """Number of unfinished outputs."""
        return sum(not output.ended for output in self.outputs)

    @property
    def begun(self) -> bool:
        """Whether every output has a token."""
        return all(output.token_ids or output.ended for output in self.outputs)

    @property
    def accepted(self) -> bool:
        """Whether an engine has begun to compute it."""
        return self._may_accept

    @property
    def done(self) -> bool:
        """Whether `take` has yielded everything."""
        return not self._unfinished

    @property
    def ended_by_engine(self) -> bool:
        """Whether the engine itself ended all outputs, so that nothing runs there."""
        return all(output.ended and output.reason != STOP_STRING for output in self.outputs)

    @property
    def first_time(self) -> float | None:
        """Arrival time of the first token, if any."""
        times = [output.first_time for output in self.outputs if output.token_ids]
        return min(times, default=None)

    @property
    def last_time(self) -> float:
        """Arrival time of the last token."""
        return max(output.last_time for output in self.outputs)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token, if any."""
        first = self.first_time
        return None if first is None else first - self.request.arrival

    @property
    def output_tokens(self) -> int:
        """Total number of sampled tokens."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def lengths(self) -> list[int]:
        """Length of each output once all are complete; empty before."""
        return [len(output.token_ids) for output in self.outputs] if self.done else []

    def accept_queued(self, position: int) -> generation_pb2.GenerateResponse | None:
        """Return a queued request's Accepted; None if already sent, or not complete yet.

        Args:
            position: Position in the queue, from 1.
        """
        if self._accepted_sent or self.request.message.output.HasField("prompt_logprobs"):
            return None
        self._accepted_sent = True
        self._accepted.queue_position = position
        return generation_pb2.GenerateResponse(accepted=self._accepted)

    def begin_attempt(self, engine: str, trace_context: Mapping[str, str]) -> engine_pb2.Submit:
        """Return the message to an engine: the request, and the tokens sampled so far.

        Args:
            engine: The engine's address.
            trace_context: Trace context for the engine's spans.
        """
        self.engine = engine
        if isinstance(self._error, EngineLostError):
            self._error = None
        submit = self.request.submit()
        submit.trace_context.update(trace_context)
        if self._may_accept:  # already received, if requested
            submit.output.ClearField("prompt_logprobs")
        submit.resume.extend(
            engine_pb2.Resume(
                index=output.index,
                token_ids=() if output.ended else output.token_ids,
                finished=output.ended,
            )
            for output in self.outputs
            if output.token_ids
        )
        if self.request.deadline is not None:
            seconds = max(self.request.deadline - time.monotonic(), 0.0)
            submit.timeout.FromNanoseconds(int(seconds * 1e9))
        return submit

    def end_attempt(self) -> None:
        """Stop waiting for the engine."""
        self._stop_timer()

    def started(self, cached_tokens: int) -> None:
        """Record that an engine has started to compute the prompt."""
        if self._prompt_counted:
            return  # a previous engine did
        self._prompt_counted = True
        prompt_tokens = len(self.request.prompt)
        self.cached_tokens = self._accepted.cached_tokens = cached_tokens
        self._usage.prompt(prompt_tokens)
        self._metrics.prompt_tokens.inc(prompt_tokens)
        self._metrics.cached_tokens.inc(cached_tokens)
        if not self.request.message.output.HasField("prompt_logprobs"):
            self._accept()

    def append(self, tokens: engine_pb2.SequenceOutput) -> bool:
        """Append new tokens of one output.

        Returns:
            Whether the engine should stop the output, because of a stop string.

        Raises:
            rpc.RpcError: CANCELLED if the client does not read.
        """
        output = self.outputs[tokens.index]
        if output.ended:
            return False  # sampled before the engine received the abort
        if tokens.index == 0 and not self._may_accept:
            self._accepted.prompt_logprobs.extend(tokens.prompt_logprobs)
            self._accept()
        if tokens.HasField("score"):
            output.score = tokens.score
        output.drafted_tokens += tokens.drafted_tokens
        output.accepted_tokens += tokens.accepted_tokens
        return self._push(output, tokens.token_ids, tokens.logprobs, tokens.finish_reason)

    def append_tokens(self, index: int, token_ids: list[int]) -> bool:
        """Append an output's tokens that came without other data; see `append`."""
        output = self.outputs[index]
        if output.ended:
            return False
        if index == 0 and not self._may_accept:
            self._accept()
        return self._push(output, token_ids, (), sampling_pb2.FINISH_REASON_UNSPECIFIED)

    def _push(
        self,
        output: Output,
        token_ids: Sequence[int],
        logprobs: Sequence[sampling_pb2.TokenLogprob],
        finish_reason: sampling_pb2.FinishReason.ValueType,
    ) -> bool:
        if output.unread >= self._max_unread:
            message = f"the client did not read its stream for {self._max_unread} tokens"
            raise rpc.RpcError(grpc.StatusCode.CANCELLED, message)
        now = time.monotonic()
        first = not output.token_ids
        self._count(output, len(token_ids), now)
        output.push(token_ids, logprobs, finish_reason)
        if output.ended:
            self._observe_tpot(output)
            self._changed.set()
        elif self._final_only:
            if first:  # a prefill engine's request goes on elsewhere
                self._changed.set()
        elif first or now >= self._next_message:
            self._changed.set()
        elif self._timer is None:
            # Usually the next tokens arrive first and are sent together with these.
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._message_interval(), self._changed.set)
        return output.reason == STOP_STRING and not finish_reason

    def fail(self, error: rpc.RpcError) -> None:
        """End the attempt, or the request for errors other than `EngineLostError`."""
        if self._error is None or isinstance(self._error, EngineLostError):
            self._error = error
        self._changed.set()

    async def wait(self) -> None:
        """Wait until there are responses to send."""
        await self._changed.wait()

    def take(self) -> Iterator[generation_pb2.GenerateResponse]:
        """Yield the responses to send now, with at most one Delta per output.

        Raises:
            rpc.RpcError: The error that ended the attempt, after what came before it;
                `EngineLostError` if the request can migrate.
        """
        self._changed.clear()
        self._stop_timer()
        self._next_message = time.monotonic() + EARLY * self._message_interval()
        error = self._error
        if self._may_accept and not self._accepted_sent:
            self._accepted_sent = True
            yield generation_pb2.GenerateResponse(accepted=self._accepted)
        for output in self.outputs if self._may_accept else ():
            if output.finished:
                continue
            ended = output.ended
            if self._final_only and not ended:
                continue
            if (delta := output.take()) is not None:
                yield generation_pb2.GenerateResponse(delta=delta)
            if ended:
                finished = output.finish(len(self.request.prompt), self.cached_tokens)
                self._unfinished -= 1
                yield generation_pb2.GenerateResponse(finished=finished)
        if error is not None and not self.done:
            raise error

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _accept(self) -> None:
        self._may_accept = True
        self._changed.set()

    def _count(self, output: Output, tokens: int, now: float) -> None:
        if not output.token_ids:
            if self.ttft is None:
                self._metrics.ttft.observe(now - self.request.arrival)
            output.first_time = now
        elif tokens:
            self._metrics.itl.observe((now - output.last_time) / tokens)
        output.last_time = now
        self._metrics.output_tokens.inc(tokens)
        self._usage.output(tokens)

    def _observe_tpot(self, output: Output) -> None:
        if output.seconds_per_token is not None:
            self._metrics.tpot.observe(output.seconds_per_token)
