"""One Generate call on its way: what it asked for, what came, what is still to be sent."""

import asyncio
import math
import secrets
import time
from collections.abc import Iterator, Mapping
from functools import cached_property

import grpc

from octavo.common import rpc
from octavo.router.admission import Ticket
from octavo.router.balancing.prompt import Prompt
from octavo.router.engines.session import EngineLostError, Session
from octavo.router.metrics import ModelMetrics
from octavo.router.requests.output import STOP_STRING, Output
from octavo.router.requests.pacing import Pacer
from octavo.router.requests.validation import num_outputs
from octavo.router.tenants.quota import Usage
from octavo.router.text.detokenizer import Pieces
from octavo.v1 import engine_pb2, generation_pb2


class Request:
    """A valid request; the receiver of its session's events, and its own progress.

    It knows the prompt, the seed and every token drawn, which is all that
    another engine needs to go on from there: `submit` may be called again when
    `take` has raised `EngineLostError`.

    Attributes:
        request_id: As the client knows it.
        model: The resolved name.
        prompt: The prompt's tokens.
        max_tokens: Most tokens of each output.
        arrival: When it came, by the monotonic clock.
        deadline: When the client gives up, by the same clock; None for never.
        outputs: One for each of `n`.
        cached_tokens: Prompt tokens that the first engine found in its cache.
        moves: How many engines it has lost.
        failed_on: The engine of these that failed on it, or None.
    """

    def __init__(
        self,
        message: generation_pb2.GenerateRequest,
        *,
        request_id: str,
        model: str,
        prompt: list[int],
        max_tokens: int,
        pieces: Pieces,
        arrival: float,
        deadline: float | None,
        metrics: ModelMetrics,
        usage: Usage,
        max_unread_tokens: int,
        pacer: Pacer,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.arrival = arrival
        self.deadline = deadline
        self.cached_tokens = 0
        self.moves = 0
        self.failed_on: object | None = None
        self.outputs = [
            Output(i, pieces, message.stop, message.output) for i in range(num_outputs(message))
        ]
        self._message = message
        self._metrics = metrics
        self._usage = usage
        self._cache_salt = usage.tenant.salt(message.cache_salt)
        self._final_only = message.output.final_only
        # What comes whole waits for its end, however fast the client reads.
        whole = message.HasField("beam") or self._final_only
        self._max_unread = math.inf if whole else max_unread_tokens
        self._event = asyncio.Event()
        self._pacer = pacer
        self._next_message = 0.0  # when tokens may go again
        self._timer: asyncio.TimerHandle | None = None  # sets the event then
        self._unfinished = len(self.outputs)
        self._error: rpc.RpcError | None = None
        self._accepted = generation_pb2.Accepted(
            request_id=request_id, model=model, prompt_tokens=len(prompt)
        )
        self._started = False  # its prompt has been computed on
        self._begun = False  # Accepted may be sent
        self._accepted_sent = False
        self._stopped = False  # an output was ended here, not by the engine
        self._session: Session | None = None
        self._session_id = ""

    @property
    def ticket(self) -> Ticket:
        """What admission needs to know."""
        stop = self._message.stop
        endless = stop.ignore_eos and not (stop.strings or stop.token_ids)
        return Ticket(
            self.model,
            sequences=sum(not output.ended for output in self.outputs),
            priority=self._message.priority,
            arrival=self.arrival,
            prompt_tokens=len(self.prompt),
            min_tokens=self.max_tokens if endless else stop.min_tokens,
            max_tokens=self.max_tokens,
            deadline=self.deadline,
            moved=self.moves > 0,
            avoid=self.failed_on,
            prompt=Prompt(self.prompt, self._cache_salt),
            tenant=self._usage.tenant,
            progress=self,
        )

    @property
    def done(self) -> bool:
        """Whether everything has been taken for sending."""
        return not self._unfinished

    @property
    def first_time(self) -> float | None:
        """When the first token came, if one did."""
        times = [output.first_time for output in self.outputs if output.token_ids]
        return min(times, default=None)

    @property
    def last_time(self) -> float:
        """When the newest token came."""
        return max(output.last_time for output in self.outputs)

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token, if one came."""
        first = self.first_time
        return None if first is None else first - self.arrival

    @property
    def output_tokens(self) -> int:
        """Tokens drawn for all outputs."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each output once all have ended of themselves; empty until then."""
        return [len(output.token_ids) for output in self.outputs] if self.done else []

    @cached_property
    def _seed(self) -> int:
        """The client's seed, or a random one: the outputs can be made again in either case."""
        sampling = self._message.sampling
        return sampling.seed if sampling.HasField("seed") else secrets.randbits(64)

    def submit(
        self, session: Session, timeout: float | None, trace_context: Mapping[str, str]
    ) -> None:
        """Starts the request on an engine, from the tokens that others drew for it.

        Args:
            session: The engine's session.
            timeout: Seconds to the client's deadline, if it has one.
            trace_context: What the engine is told of the trace.

        Raises:
            EngineLostError: The session has broken.
        """
        message = self._message
        submit = engine_pb2.Submit(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            stop=message.stop,
            output=message.output,
            priority=message.priority,
            cache_salt=self._cache_salt,
            trace_context=trace_context,
        )
        submit.stop.max_tokens = self.max_tokens
        submit.stop.ClearField("strings")
        submit.stop.ClearField("include_in_output")
        if self._begun:  # they were sent, if asked for
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
        if message.HasField("beam"):
            submit.beam.CopyFrom(message.beam)
        else:
            submit.sampling.CopyFrom(message.sampling)
            submit.sampling.seed = self._seed
        if timeout is not None:
            submit.timeout.FromNanoseconds(int(max(timeout, 0) * 1e9))
        self._session_id = session.submit(submit, self)
        self._session = session
        if isinstance(self._error, EngineLostError):
            self._error = None

    def close(self) -> None:
        """Stops on the engine what has not ended there."""
        self._stop_timer()
        if self._session is None:
            return
        if self._stopped or not all(output.ended for output in self.outputs):
            self._session.abort(self._session_id)
        else:
            self._session.forget(self._session_id)
        self._session = None

    def started(self, cached_tokens: int) -> None:
        """The engine began to compute the prompt."""
        if self._started:
            return  # once more, elsewhere
        self._started = True
        self.cached_tokens = self._accepted.cached_tokens = cached_tokens
        self._usage.prompt(len(self.prompt))
        self._metrics.prompt_tokens.inc(len(self.prompt))
        self._metrics.cached_tokens.inc(cached_tokens)
        if not self._message.output.HasField("prompt_logprobs"):
            self._begin()

    def received(self, output: engine_pb2.SequenceOutput) -> None:
        """New tokens of one output."""
        mine = self.outputs[output.index]
        if mine.ended:
            return  # drawn before the engine heard of the end
        if mine.unread >= self._max_unread:
            self._give_up()
            return
        if output.index == 0 and not self._begun:
            self._accepted.prompt_logprobs.extend(output.prompt_logprobs)
            self._begin()
        if output.HasField("score"):
            mine.score = output.score
        now = time.monotonic()
        first = not mine.token_ids
        self._note_time(mine, len(output.token_ids), now)
        mine.push(output.token_ids, output.logprobs, output.finish_reason)
        if mine.reason == STOP_STRING:
            self._stopped = True
            if not output.finish_reason and self._session is not None:
                self._session.abort(self._session_id, output.index)
        if mine.ended:
            self._note_tpot(mine)
            self._event.set()
        elif self._final_only:
            pass
        elif first or now >= self._next_message:
            self._event.set()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._next_message - now, self._event.set)

    def failed(self, error: rpc.RpcError) -> None:
        """The request ended without finishing, on its engine or altogether."""
        if self._error is None or isinstance(self._error, EngineLostError):
            self._error = error
        self._event.set()

    def _give_up(self) -> None:
        """Stops at once what the client does not read; it hears of it when it does."""
        if self._session is not None:
            self._session.abort(self._session_id)
        message = f"the client did not read its stream for {self._max_unread} tokens"
        self.failed(rpc.RpcError(grpc.StatusCode.CANCELLED, message))

    async def wait(self) -> None:
        """Waits until there is something to take."""
        await self._event.wait()

    def take(self) -> Iterator[generation_pb2.GenerateResponse]:
        """Yields what is to be sent now, one Delta at most for each output.

        What comes while the consumer is busy is for the next call.

        Raises:
            rpc.RpcError: What the request failed with, after what came before;
                an `EngineLostError` where it can be submitted elsewhere.
        """
        self._event.clear()
        self._stop_timer()
        self._next_message = time.monotonic() + self._pacer.interval
        error = self._error
        if self._begun and not self._accepted_sent:
            self._accepted_sent = True
            yield generation_pb2.GenerateResponse(accepted=self._accepted)
        for output in self.outputs if self._begun else ():
            if output.finished:
                continue
            ended = output.ended
            if self._final_only and not ended:
                continue
            if (delta := output.take()) is not None:
                yield generation_pb2.GenerateResponse(delta=delta)
            if ended:
                finished = output.finish(len(self.prompt), self.cached_tokens)
                self._unfinished -= 1
                yield generation_pb2.GenerateResponse(finished=finished)
        if error is not None and not self.done:
            raise error

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        self._begun = True
        self._event.set()

    def _note_time(self, output: Output, tokens: int, now: float) -> None:
        if not output.token_ids:
            if self.ttft is None:
                self._metrics.ttft.observe(now - self.arrival)
            output.first_time = now
        elif tokens:
            self._metrics.itl.observe((now - output.last_time) / tokens)
        output.last_time = now
        self._metrics.output_tokens.inc(tokens)
        self._usage.output(tokens)

    def _note_tpot(self, output: Output) -> None:
        if len(output.token_ids) > 1:
            seconds = output.last_time - output.first_time
            self._metrics.tpot.observe(seconds / (len(output.token_ids) - 1))
