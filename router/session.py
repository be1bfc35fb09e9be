"""The one stream between the router and an engine, with all requests in it."""

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

import grpc
import grpc.aio
import structlog

from octavo.common import rpc
from octavo.common.limits import MAX_REQUEST_ID
from octavo.v1 import engine_pb2

log = structlog.get_logger(__name__)

MAX_ABORTED = 4096
"""Aborted requests whose late tokens are still told from a new request's of the same id."""


class Receiver(Protocol):
    """Whoever a request's events go to. Called from the reading loop: must not block."""

    def started(self, cached_tokens: int) -> None:
        """The engine began to compute the prompt."""

    def received(self, output: engine_pb2.SequenceOutput) -> None:
        """New tokens of one output."""

    def failed(self, error: rpc.RpcError) -> None:
        """The request ended without finishing; nothing more will come."""


class Session:
    """Submits and aborts requests, and hands each its events, until the stream breaks.

    Args:
        call: The open Session call. This object is the only one to use it.
        name: The engine's address, for messages.
        on_load: Called with every load report.
    """

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]",
        name: str,
        on_load: Callable[[engine_pb2.Load], None],
    ) -> None:
        self._call = call
        self._name = name
        self._on_load = on_load
        # Never longer than a few commands for each request admitted to the engine.
        self._outbox: asyncio.Queue[engine_pb2.SessionRequest] = asyncio.Queue()
        self._receivers: dict[str, Receiver] = {}
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._numbers = itertools.count(1)
        self._broken: str | None = None

    def __len__(self) -> int:
        return len(self._receivers)

    def submit(self, submit: engine_pb2.Submit, receiver: Receiver) -> str:
        """Starts a request whose events go to `receiver`.

        Returns:
            The request's id in this session: the one in `submit` unless that
            is taken, by a live request or by the late tokens of an aborted one.

        Raises:
            rpc.RpcError: UNAVAILABLE if the stream is broken.
        """
        if self._broken is not None:
            raise self._lost()
        session_id = self._free_id(submit.request_id)
        submit.request_id = session_id
        self._receivers[session_id] = receiver
        self._outbox.put_nowait(engine_pb2.SessionRequest(submit=submit))
        return session_id

    def abort(self, session_id: str, index: int | None = None) -> None:
        """Stops a request, whose receiver hears no more, or one output of it."""
        if index is None:
            if self._receivers.pop(session_id, None) is None:
                return
            self._aborted[session_id] = None
            if len(self._aborted) > MAX_ABORTED:
                self._aborted.popitem(last=False)
        abort = engine_pb2.Abort(request_id=session_id, index=index)
        self._outbox.put_nowait(engine_pb2.SessionRequest(abort=abort))

    def forget(self, session_id: str) -> None:
        """Lets go of a request whose every output the engine has finished."""
        self._receivers.pop(session_id, None)

    async def run(self) -> str:
        """Reads and writes until the stream breaks; then fails every request.

        Returns:
            What broke it, for a person.
        """
        writer = asyncio.create_task(self._write(), name=f"session-writer:{self._name}")
        try:
            self._broken = await self._read()
        finally:
            writer.cancel()
            self._call.cancel()
            self._broken = self._broken or "the router closed the connection"
            await asyncio.gather(writer, return_exceptions=True)
            receivers, self._receivers = self._receivers, {}
            for receiver in receivers.values():
                receiver.failed(self._lost())
        return self._broken

    async def _read(self) -> str:
        try:
            while isinstance(response := await self._call.read(), engine_pb2.SessionResponse):
                self._dispatch(response)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        return "the engine ended the session"

    async def _write(self) -> None:
        try:
            while True:
                await self._call.write(await self._outbox.get())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader hears of it, and why

    def _dispatch(self, response: engine_pb2.SessionResponse) -> None:
        for started in response.started:
            self._deliver(started.request_id, "started", started.cached_tokens)
        for output in response.outputs:
            self._deliver(output.request_id, "received", output)
        for failure in response.failures:
            error = rpc.RpcError.from_code(failure.code, failure.message, failure.field)
            self._deliver(failure.request_id, "failed", error)
            self.forget(failure.request_id)
        if response.HasField("load"):
            self._on_load(response.load)

    def _deliver(self, session_id: str, event: str, argument: object) -> None:
        receiver = self._receivers.get(session_id)
        if receiver is None:
            return  # aborted; this was on its way
        try:
            getattr(receiver, event)(argument)
        except Exception as error:
            # One request's trouble is not the others'.
            log.exception("request_failed", request_id=session_id, engine=self._name)
            self.abort(session_id)
            message = "an unexpected error; the router's log has the details"
            receiver.failed(
                error
                if isinstance(error, rpc.RpcError)
                else rpc.RpcError(grpc.StatusCode.INTERNAL, message)
            )

    def _free_id(self, wanted: str) -> str:
        session_id = wanted
        while session_id in self._receivers or session_id in self._aborted:
            session_id = f"{wanted[: MAX_REQUEST_ID - 16]}~{next(self._numbers)}"
        return session_id

    def _lost(self) -> rpc.RpcError:
        return rpc.unavailable(
            f"the connection to engine {self._name} was lost ({self._broken}); retry the request"
        )
