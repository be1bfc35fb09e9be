"""A connection to one engine: what it has reported, and the one stream for all requests."""

import asyncio
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

import grpc
import grpc.aio
import structlog

from octavo.common import rpc
from octavo.common.background import joined
from octavo.common.kv_cache.layer_group_messages import to_budget
from octavo.common.limits import MAX_REQUEST_ID
from octavo.router.admission.claims import Claims
from octavo.router.balancing.policy import RequestNeeds
from octavo.router.balancing.prefixes import Prefixes
from octavo.router.requests.errors import EngineFaultError, EngineLostError
from octavo.router.requests.state import RequestState
from octavo.router.text.tokenization import Tokenizer
from octavo.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2

log = structlog.get_logger(__name__)

MAX_ABORTED = 4096
"""Number of aborted requests whose ids are not given again, as tokens of theirs may still come."""
INTERNAL: int = grpc.StatusCode.INTERNAL.value[0]
SILENT_LOOKS = 4
"""How often silence is looked at before it counts: what stops the router itself for a while,
engine messages included, is one look and no engine's silence."""
PARTS = ("writer", "reader", "watcher")


class Engine:
    """One connection to one engine, from its opening to its end.

    It submits and aborts requests, and passes each its events, until the stream breaks.

    Args:
        call: The open `Session` call, which this object alone uses.
        address: The engine's address.
        info: The engine's own description.
        tokenizer: Its model's tokenizer.
        stub: Stub for calls besides the session.
        on_report: Called with every message, for its load and its prefix changes.
        on_fault: Called when a step failed on the engine, before its requests hear of it.
        heartbeat_timeout: Seconds of silence after which the engine counts as hung.

    Attributes:
        address: Its address.
        info: Its own description.
        tokenizer: Its model's tokenizer.
        stub: Stub for calls besides the session.
        load: Its last report.
        claims: The requests given to it that have not ended.
        budget: Its blocks, and what requests need of them.
        prefixes: Prefixes that its cache is believed to hold.
        adapters: The LoRA adapters that it has loaded, by name.
        up: Whether it can be used: from its core's first sign of life to the
            connection's end.
        up_since: Time at which it came up, by the monotonic clock.
    """

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]",
        address: str,
        info: engine_pb2.GetEngineInfoResponse,
        tokenizer: Tokenizer,
        stub: "engine_pb2_grpc.EngineServiceAsyncStub",
        *,
        on_report: "Callable[[Engine, engine_pb2.SessionResponse], None]",
        on_fault: "Callable[[Engine], None]",
        heartbeat_timeout: float,
    ) -> None:
        self.address = address
        self.info = info
        self.tokenizer = tokenizer
        self.stub = stub
        self.load = info.load
        self.budget = to_budget(info, info.load.total_blocks)
        self.claims = Claims(self.budget)
        self.adapters = {adapter.name: adapter for adapter in info.adapters}
        self.prefixes = Prefixes()
        self.up = False
        self.up_since = math.inf
        self._call = call
        self._on_report = on_report
        self._on_fault = on_fault
        # Never longer than a few commands for each request admitted to the engine.
        self._outbox: asyncio.Queue[engine_pb2.SessionRequest] = asyncio.Queue()
        self._requests: dict[str, RequestState] = {}
        # A request's id, its state and the index of its output, by the output's number.
        self._outputs: dict[int, tuple[str, RequestState, int]] = {}
        self._first_numbers: dict[str, int] = {}
        self._next_number = 1
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._numbers = itertools.count(1)
        self._broken: str | None = None
        self._heartbeat_timeout = heartbeat_timeout
        self._heard = False  # anything, since the last look

    @property
    def instance(self) -> str:
        """What identifies the running engine, whatever its addresses."""
        return self.info.instance_id or self.address

    @property
    def models(self) -> list[str]:
        """The models that requests may name: its own, and its adapters."""
        return [self.info.model, *self.adapters]

    def serves(self, model: str) -> bool:
        """Return whether requests may name a model here."""
        return model == self.info.model or model in self.adapters

    @property
    def defaults(self) -> tuple[sampling_pb2.SamplingParams, int | None]:
        """Its model's sampling parameters and maximum output length for requests without them."""
        limited = self.info.HasField("default_max_tokens")
        return self.info.default_sampling, self.info.default_max_tokens if limited else None

    @property
    def sequences(self) -> int:
        """Sequences given to it that have not ended."""
        return self.claims.sequences

    @property
    def max_num_seqs(self) -> int:
        """Maximum sequences in its running batch."""
        return self.info.max_num_seqs

    def cached_tokens(self, request: RequestNeeds) -> int:
        """Return how many of a prompt's tokens its cache is assumed to have."""
        if not self.info.features.prefix_caching:
            return 0
        keys = request.keys(self.info.block_size)
        return self.prefixes.match(keys) * self.info.block_size

    def expect(self, request: RequestNeeds) -> None:
        """Assume from now on that its cache has the prompt: it is about to compute it."""
        if self.info.features.prefix_caching:
            self.prefixes.expect(request.keys(self.info.block_size))

    @property
    def broken(self) -> bool:
        """Whether the stream has ended, or is about to: it takes no more requests."""
        return self._broken is not None

    @property
    def num_requests(self) -> int:
        """Requests that get events."""
        return len(self._requests)

    def submit(self, state: RequestState, submit: engine_pb2.Submit) -> str:
        """Start an attempt of a request, which gets its events.

        Returns:
            The request's id in this session: the one in `submit` unless that
            is taken, by a live request or by the late tokens of an aborted one.

        Raises:
            EngineLostError: The stream is broken.
        """
        if self._broken is not None:
            raise self._lost()
        session_id = self._free_id(submit.request_id)
        submit.request_id = session_id
        submit.first_number = self._next_number
        self._requests[session_id] = state
        self._first_numbers[session_id] = self._next_number
        for index in range(len(state.outputs)):
            self._outputs[self._next_number] = session_id, state, index
            self._next_number += 1
        self._outbox.put_nowait(engine_pb2.SessionRequest(submit=submit))
        return session_id

    def abort(self, session_id: str, index: int | None = None) -> None:
        """Stop a request, which gets no more events, or one output of it."""
        if index is None:
            if self._forget(session_id) is None:
                return
            self._aborted[session_id] = None
            if len(self._aborted) > MAX_ABORTED:
                self._aborted.popitem(last=False)
        abort = engine_pb2.Abort(request_id=session_id, index=index)
        self._outbox.put_nowait(engine_pb2.SessionRequest(abort=abort))

    def end(self, session_id: str) -> None:
        """End an attempt: stop on the engine what still runs there."""
        state = self._requests.get(session_id)
        if state is not None and state.ended_by_engine:
            self._forget(session_id)
        else:
            self.abort(session_id)

    async def run(self) -> str:
        """Read and write until the stream breaks or is silent; then fail every request.

        Returns:
            What broke it, for a person.
        """
        try:
            async with joined(
                *(self._write(), self._read(), self._watch()),
                names=tuple(f"session-{part}:{self.address}" for part in PARTS),
            ) as tasks:
                self._broken = await _first_reason(tasks)
        finally:
            self._broken = self._broken or "the router closed the connection"
            self._call.cancel()
            for session_id in list(self._requests):
                if (state := self._forget(session_id)) is not None:
                    state.fail(self._lost())
        return self._broken

    async def _read(self) -> str:
        try:
            while isinstance(response := await self._call.read(), engine_pb2.SessionResponse):
                self._heard = True
                self._dispatch(response)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "the engine ended the session"

    async def _watch(self) -> str:
        """Return when nothing has come for too long: the engine hangs, if its process lives."""
        silent = 0
        while silent < SILENT_LOOKS:
            self._heard = False
            await asyncio.sleep(self._heartbeat_timeout / SILENT_LOOKS)
            silent = 0 if self._heard else silent + 1
        return f"no sign of life for {self._heartbeat_timeout:g} s"

    async def _write(self) -> str | None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return None  # the reader hears of it, and why

    def _dispatch(self, response: engine_pb2.SessionResponse) -> None:
        for started in response.started:
            if (state := self._requests.get(started.request_id)) is not None:
                state.started(started.cached_tokens)
        self._append_tokens(response.tokens)
        for output in response.outputs:
            if (state := self._requests.get(output.request_id)) is not None:
                try:
                    if state.append(output):
                        self.abort(output.request_id, output.index)
                except Exception as error:  # noqa: BLE001 - it fails this request alone
                    self._fail(output.request_id, state, error)
        if any(failure.code == INTERNAL for failure in response.failures):
            self._on_fault(self)
        for failure in response.failures:
            if (state := self._forget(failure.request_id)) is not None:
                state.fail(_error(failure))
        self._on_report(self, response)

    def _append_tokens(self, tokens: engine_pb2.NumberedTokens) -> None:
        """Give outputs that only got tokens these tokens."""
        for number, token_ids in by_number(tokens).items():
            if (known := self._outputs.get(number)) is None:
                continue  # it was aborted
            session_id, state, index = known
            try:
                if state.append_tokens(index, token_ids):
                    self.abort(session_id, index)
            except Exception as error:  # noqa: BLE001 - it fails this request alone
                self._fail(session_id, state, error)

    def _forget(self, session_id: str) -> RequestState | None:
        """Pass no more to a request, and return it; None if it is not known."""
        state = self._requests.pop(session_id, None)
        if state is not None:
            first = self._first_numbers.pop(session_id)
            for number in range(first, first + len(state.outputs)):
                del self._outputs[number]
        return state

    def _fail(self, session_id: str, state: RequestState, error: Exception) -> None:
        """Stop a request that could not take its tokens, and fail it."""
        if not isinstance(error, rpc.RpcError):
            log.error("request failed", request_id=session_id, engine=self.address, exc_info=error)
            error = rpc.RpcError(grpc.StatusCode.INTERNAL, rpc.UNEXPECTED)
        self.abort(session_id)
        state.fail(error)

    def _free_id(self, wanted: str) -> str:
        session_id = wanted
        while session_id in self._requests or session_id in self._aborted:
            session_id = f"{wanted[: MAX_REQUEST_ID - 16]}~{next(self._numbers)}"
        return session_id

    def _lost(self) -> EngineLostError:
        """For clients: which engine, and why it was lost, is for the log."""
        return EngineLostError("the connection to the request's engine was lost; retry the request")


def by_number(tokens: engine_pb2.NumberedTokens) -> dict[int, list[int]]:
    """Return each output's tokens, by its number."""
    outputs: dict[int, list[int]] = {}
    for number, token_id in zip(tokens.numbers, tokens.token_ids, strict=True):
        if (token_ids := outputs.get(number)) is None:
            outputs[number] = [token_id]
        else:
            token_ids.append(token_id)
    return outputs


async def _first_reason(tasks: Iterable[asyncio.Task[str | None]]) -> str:
    """Return the first reason that a task ends with; raise the error of one that fails."""
    for task in asyncio.as_completed(tasks):
        if (reason := await task) is not None:
            return reason
    raise AssertionError("the reader ends with a reason")


def _error(failure: engine_pb2.Failure) -> rpc.RpcError:
    """Return the error that a failure stands for."""
    if failure.code == grpc.StatusCode.UNAVAILABLE.value[0]:
        return EngineLostError(failure.message)
    if failure.code == INTERNAL:
        return EngineFaultError(failure.message)
    return rpc.RpcError.from_code(failure.code, failure.message, failure.field)
