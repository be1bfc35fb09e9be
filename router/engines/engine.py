"""The connection to one engine: its last report, and the stream that carries all requests."""

import asyncio
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import grpc.aio
import structlog

from octavo.common import rpc
from octavo.common.background import joined
from octavo.common.image_store import ImageStore
from octavo.common.kv_cache.layer_group_messages import to_budget
from octavo.common.limits import MAX_REQUEST_ID
from octavo.router.admission.claims import Claims
from octavo.router.balancing.policy import RequestNeeds
from octavo.router.balancing.prefixes import Prefixes
from octavo.router.requests.embedding import EmbeddingState
from octavo.router.requests.errors import EngineFaultError, EngineLostError
from octavo.router.requests.request import Request
from octavo.router.requests.state import RequestState
from octavo.router.text.tokenizer import Tokenizer
from octavo.v1 import engine_pb2, engine_pb2_grpc, sampling_pb2

log = structlog.get_logger(__name__)

MAX_ABORTED = 4096
"""Number of aborted requests whose ids are not reused, as late tokens may still arrive."""
PIECE_BYTES = 1 << 20
"""Bytes of an image in a message."""
INTERNAL: int = grpc.StatusCode.INTERNAL.value[0]
SILENT_LOOKS = 4
"""Number of consecutive silent intervals before an engine counts as hung: if the router itself
stalls, that is one interval, not the engine's silence."""
PARTS = ("writer", "reader", "watcher")


class Engine:
    """One connection to one engine, from opening to end.

    It submits and aborts requests, and delivers their events, until the stream breaks.

    Args:
        call: The open `Session` call, used by this object only.
        address: HOST:PORT of the engine.
        info: The engine's description of itself.
        tokenizer: The model's tokenizer.
        stub: Stub for RPCs other than the session.
        on_report: Called with every message, for its load and prefix changes.
        on_fault: Called when a step failed on the engine, before its requests fail.
        heartbeat_timeout: Seconds without messages after which the engine counts as hung.

    Attributes:
        address: HOST:PORT of the engine.
        info: The engine's description of itself.
        tokenizer: The model's tokenizer.
        stub: Stub for RPCs other than the session.
        load: The engine's last load report.
        claims: The router's unfinished requests on the engine.
        budget: The engine's blocks, and how many a request needs.
        prefixes: Prefixes assumed to be cached.
        adapters: Loaded LoRA adapters, by name.
        up: Whether the engine is usable: from its core's first message to the connection's end.
        up_since: Monotonic time of becoming usable.
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
        # Unbounded, but holds only a few commands per admitted request.
        self._outbox: asyncio.Queue[engine_pb2.SessionRequest] = asyncio.Queue()
        self._requests: dict[str, RequestState] = {}
        self._embeddings: set[Any] = set()  # calls in progress
        # Request id, state and output index, by the output's number on the stream.
        self._outputs: dict[int, tuple[str, RequestState, int]] = {}
        self._first_numbers: dict[str, int] = {}
        self._next_number = 1
        self._aborted: OrderedDict[str, None] = OrderedDict()
        self._numbers = itertools.count(1)
        self._images = ImageStore[None](info.image_store_bytes)
        self._broken: str | None = None
        self._heartbeat_timeout = heartbeat_timeout
        self._heard = False  # whether a message came this interval

    @property
    def instance(self) -> str:
        """Id of the running engine, the same at each of its addresses."""
        return self.info.instance_id or self.address

    @property
    def block_layout(self) -> str:
        """Name of its blocks' layout; empty if it copies none."""
        return self.info.block_layout

    @property
    def role(self) -> str:
        """The value of its --role."""
        role = self.info.role or engine_pb2.ENGINE_ROLE_BOTH
        return engine_pb2.EngineRole.Name(role).removeprefix("ENGINE_ROLE_").lower()

    @property
    def prefills(self) -> bool:
        """Whether its role is to compute prompts."""
        return self.info.role == engine_pb2.ENGINE_ROLE_PREFILL

    @property
    def models(self) -> list[str]:
        """The models that requests may name: the base model and the adapters."""
        return [self.info.model, *self.adapters]

    def serves(self, model: str) -> bool:
        """Return whether the engine serves a model."""
        return model == self.info.model or model in self.adapters

    @property
    def defaults(self) -> tuple[sampling_pb2.SamplingParams, int | None]:
        """The model's default sampling parameters and maximum output length."""
        limited = self.info.HasField("default_max_tokens")
        return self.info.default_sampling, self.info.default_max_tokens if limited else None

    @property
    def sequences(self) -> int:
        """Number of unfinished sequences that this router sent to the engine."""
        return self.claims.sequences

    @property
    def max_num_seqs(self) -> int:
        """Maximum sequences in the engine's running batch."""
        return self.info.max_num_seqs

    def cached_tokens(self, request: RequestNeeds) -> int:
        """Return the number of a prompt's tokens that are assumed to be cached in memory."""
        if not self.info.features.prefix_caching:
            return 0
        keys = request.keys(self.info.block_size)
        return self.prefixes.match(keys) * self.info.block_size

    def held_tokens(self, request: RequestNeeds) -> int:
        """Return the number of a prompt's tokens that the engine has reported to be cached."""
        return self.prefixes.held(request.keys(self.info.block_size)) * self.info.block_size

    def saved_tokens(self, request: RequestNeeds) -> float:
        """Return the number of a prompt's tokens whose computing the engine's prefixes save."""
        if not self.info.features.prefix_caching:
            return 0
        keys = request.keys(self.info.block_size)
        return self.prefixes.worth(keys, self.load.disk_read_share) * self.info.block_size

    def expect(self, request: RequestNeeds) -> None:
        """Assume that the prompt is cached from now on: the engine is about to compute it."""
        if self.info.features.prefix_caching:
            self.prefixes.expect(request.keys(self.info.block_size))

    @property
    def broken(self) -> bool:
        """Whether the stream has ended or is about to end; it accepts no more requests."""
        return self._broken is not None

    @property
    def num_requests(self) -> int:
        """Number of requests that receive events."""
        return len(self._requests)

    def submit(self, state: RequestState, submit: engine_pb2.Submit) -> str:
        """Start an attempt of a request, which then receives its events.

        Returns:
            The request's id in this session: the one in `submit`, unless a live request or a
            recently aborted one has it.

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
        for _, image in state.request.images:
            self._send_image(image.digest, image.tensors)
        self._outbox.put_nowait(engine_pb2.SessionRequest(submit=submit))
        return session_id

    def _send_image(self, digest: bytes, tensors: bytes) -> None:
        """Send an image, or its digest alone if the engine has kept it."""
        if self._images.has(digest):
            pieces = [engine_pb2.ImagePiece(digest=digest, last=True)]
        else:
            self._images.add(digest, len(tensors), None)
            starts = range(0, len(tensors), PIECE_BYTES)
            pieces = [
                engine_pb2.ImagePiece(
                    digest=digest,
                    data=tensors[start : start + PIECE_BYTES],
                    last=start + PIECE_BYTES >= len(tensors),
                )
                for start in starts
            ]
        for piece in pieces:
            self._outbox.put_nowait(engine_pb2.SessionRequest(image=piece))

    def abort(self, session_id: str, index: int | None = None) -> None:
        """Abort a request or one of its outputs; it receives no more events."""
        if index is None:
            if self._forget(session_id) is None:
                return
            self._aborted[session_id] = None
            if len(self._aborted) > MAX_ABORTED:
                self._aborted.popitem(last=False)
        abort = engine_pb2.Abort(request_id=session_id, index=index)
        self._outbox.put_nowait(engine_pb2.SessionRequest(abort=abort))

    def end(self, session_id: str) -> None:
        """End an attempt: abort outputs that still run on the engine."""
        state = self._requests.get(session_id)
        if state is not None and state.ended_by_engine:
            self._forget(session_id)
        else:
            self.abort(session_id)

    async def embed(self, state: EmbeddingState, timeout: float | None) -> None:
        """Have the engine embed a request's texts.

        Raises:
            EngineLostError: The connection is lost, the engine drains, or a step failed.
            rpc.RpcError: The engine refuses the request, or it was failed meanwhile.
        """
        if self._broken is not None:
            raise self._lost()
        call: Any = self.stub.Embed(state.request.submit(), timeout=timeout)
        self._embeddings.add(call)
        try:
            await state.take(self.address, call)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise self._lost() from error
            if error.code() is grpc.StatusCode.INTERNAL:
                self._on_fault(self)
                raise EngineFaultError(error.details() or "") from error
            raise rpc.RpcError.from_call(error) from error
        except asyncio.CancelledError:
            if self._broken is None:
                raise
            raise self._lost() from None  # `run` cancelled the call, not this task
        finally:
            self._embeddings.discard(call)

    async def prefetch(self, request: Request, source: str) -> None:
        """Have the engine copy a prompt's blocks from the one that computes them."""
        message = engine_pb2.PrefetchBlocksRequest(
            prompt_token_ids=request.prompt,
            cache_salt=request.salt,
            adapter=request.adapter,
            kv_source=source,
        )
        try:
            await self.stub.PrefetchBlocks(message)
        except grpc.aio.AioRpcError as error:  # it will copy or compute them later
            log.warning("prompt not prefetched", engine=self.address, reason=error.details())

    async def run(self) -> str:
        """Read and write until the stream breaks or is silent; then fail all requests.

        Returns:
            Reason of the end, as text.
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
            for call in self._embeddings:
                call.cancel()
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
        """Return when the engine has sent no message for too long: it hangs."""
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
            return None  # the reader reports the error

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
                except Exception as error:  # noqa: BLE001 - fails only this request
                    self._fail(output.request_id, state, error)
        if any(failure.code == INTERNAL for failure in response.failures):
            self._on_fault(self)
        for failure in response.failures:
            if (state := self._forget(failure.request_id)) is not None:
                state.fail(_error(failure))
        self._on_report(self, response)

    def _append_tokens(self, tokens: engine_pb2.NumberedTokens) -> None:
        """Append tokens to outputs that received nothing else."""
        for number, token_ids in by_number(tokens).items():
            if (known := self._outputs.get(number)) is None:
                continue  # aborted output
            session_id, state, index = known
            try:
                if state.append_tokens(index, token_ids):
                    self.abort(session_id, index)
            except Exception as error:  # noqa: BLE001 - fails only this request
                self._fail(session_id, state, error)

    def _forget(self, session_id: str) -> RequestState | None:
        """Stop delivering events to a request, and return it; None if unknown."""
        state = self._requests.pop(session_id, None)
        if state is not None:
            first = self._first_numbers.pop(session_id)
            for number in range(first, first + len(state.outputs)):
                del self._outputs[number]
        return state

    def _fail(self, session_id: str, state: RequestState, error: Exception) -> None:
        """Abort a request whose events raised an error, and fail it."""
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
        """Return an error without the engine and the cause, which only the log shows."""
        return EngineLostError("the connection to the request's engine was lost; retry the request")


def by_number(tokens: engine_pb2.NumberedTokens) -> dict[int, list[int]]:
    """Return the tokens of each output, by output number."""
    outputs: dict[int, list[int]] = {}
    for number, token_id in zip(tokens.numbers, tokens.token_ids, strict=True):
        if (token_ids := outputs.get(number)) is None:
            outputs[number] = [token_id]
        else:
            token_ids.append(token_id)
    return outputs


async def _first_reason(tasks: Iterable[asyncio.Task[str | None]]) -> str:
    """Return the first task's reason to end; raise the error of a task that failed."""
    for task in asyncio.as_completed(tasks):
        if (reason := await task) is not None:
            return reason
    raise AssertionError("the reader ends with a reason")


def _error(failure: engine_pb2.Failure) -> rpc.RpcError:
    """Convert an engine's failure to an error."""
    if failure.code == grpc.StatusCode.UNAVAILABLE.value[0]:
        return EngineLostError(failure.message)
    if failure.code == INTERNAL:
        return EngineFaultError(failure.message)
    return rpc.RpcError.from_code(failure.code, failure.message, failure.field)
