"""The one stream between the router and an engine; it carries all requests."""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable

import grpc
import grpc.aio
import structlog

from octavo.common import rpc
from octavo.common.background import joined
from octavo.common.limits import MAX_REQUEST_ID
from octavo.router.requests.errors import EngineFaultError, EngineLostError
from octavo.router.requests.state import RequestState
from octavo.v1 import engine_pb2

log = structlog.get_logger(__name__)

MAX_ABORTED = 4096
"""Number of aborted requests whose ids are not given again, as tokens of theirs may still come."""
INTERNAL: int = grpc.StatusCode.INTERNAL.value[0]
SILENT_LOOKS = 4
"""How often silence is looked at before it counts: what stops the router itself for a while,
engine messages included, is one look and no engine's silence."""
PARTS = ("writer", "reader", "watcher")


class EngineSession:
    """Submits and aborts requests, and passes each its events, until the stream breaks.

    Args:
        call: The open `Session` call, which this object alone uses.
        name: The engine's address, for messages.
        on_report: Called with every message, for its load and its prefix changes.
        on_fault: Called when a step failed on the engine, before its requests hear of it.
        heartbeat_timeout: Seconds of silence after which the engine counts as hung.
    """

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]",
        name: str,
        on_report: Callable[[engine_pb2.SessionResponse], None],
        on_fault: Callable[[], None],
        heartbeat_timeout: float,
    ) -> None:
        self._call = call
        self._name = name
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
    def broken(self) -> bool:
        """Whether the stream has ended, or is about to: it takes no more requests."""
        return self._broken is not None

    def __len__(self) -> int:
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
                names=tuple(f"session-{part}:{self._name}" for part in PARTS),
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
            self._on_fault()
        for failure in response.failures:
            if (state := self._forget(failure.request_id)) is not None:
                state.fail(_error(failure))
        self._on_report(response)

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
            log.error("request failed", request_id=session_id, engine=self._name, exc_info=error)
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
