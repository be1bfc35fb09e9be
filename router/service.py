"""GenerationService: what clients call."""

import asyncio
import time
import uuid
from typing import Any

import grpc
import grpc.aio
import structlog
from prometheus_client import CollectorRegistry
from structlog.contextvars import bound_contextvars

from octavo.common import rpc
from octavo.common.limits import check_token_ids
from octavo.common.tracing import Tracing
from octavo.router.admission import Admission
from octavo.router.engines.link import Engine
from octavo.router.engines.pool import EnginePool
from octavo.router.engines.session import EngineFaultError, EngineLostError
from octavo.router.metrics import RouterMetrics
from octavo.router.requests import validation
from octavo.router.requests.pacing import Pacer, WriteLimit
from octavo.router.requests.request import Request
from octavo.router.settings import RouterSettings
from octavo.router.tenants.auth import caller, check_model, check_priority
from octavo.router.tenants.quota import Account, Accounts, Usage
from octavo.router.text.tokenization import Tokenizers
from octavo.router.tracing import CallTrace
from octavo.v1 import generation_pb2, generation_pb2_grpc

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """Serves requests with the engines of a pool.

    Args:
        settings: Limits and timeouts.
        pool: The engines.
        admission: Who may use them when.
        tokenizers: Where the pool's tokenizers run.
        registry: Where metrics are registered.
        tracing: Makes calls' spans.
    """

    def __init__(
        self,
        settings: RouterSettings,
        pool: EnginePool,
        admission: Admission[Engine],
        tokenizers: Tokenizers,
        registry: CollectorRegistry,
        *,
        tracing: Tracing,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._admission = admission
        self._tokenizers = tokenizers
        self._tracing = tracing
        self._calls = 0
        self._requests: set[Request] = set()
        self._draining = False
        self._pacer = Pacer()
        self._idle = asyncio.Event()
        self._idle.set()
        self.metrics = RouterMetrics(
            registry, in_flight=lambda: self._calls, queued=lambda: len(admission)
        )
        self._accounts = Accounts(self.metrics)

    @property
    def in_flight(self) -> int:
        """How many Generate calls have come and not ended."""
        return self._calls

    async def Generate(  # type: ignore[override]  # noqa: N802 - it writes, and yields nothing
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> None:
        """Generates outputs and streams them."""
        call = _Call(self._accounts.of(caller()), self._tracing, context)
        self._calls += 1
        self._idle.clear()
        try:
            self._refuse_when_draining()
            validation.check_request_id(request.request_id)
            call.request_id = request.request_id or call.request_id
            with bound_contextvars(request_id=call.request_id), call.account.request() as usage:
                await self._generate(call, request, usage, context)
            call.outcome = grpc.StatusCode.OK
        except rpc.RpcError as error:
            call.outcome, call.message = error.code, error.message
            raise
        except asyncio.CancelledError:
            late = call.deadline is not None and time.monotonic() >= call.deadline
            call.outcome = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
            self._report(call)

    async def Tokenize(  # noqa: N802
        self,
        request: generation_pb2.TokenizeRequest,
        context: Context,  # noqa: ARG002
    ) -> generation_pb2.TokenizeResponse:
        """Turns text or a chat into tokens."""
        self._refuse_when_draining()
        self._accounts.of(caller()).call()
        model = self._resolve(request.model)
        limits = self._pool.limits(model)
        validation.check_chat(request, limits)
        token_ids = await self._tokenizers.encode(self._pool.tokenizer(model), request, caller())
        return generation_pb2.TokenizeResponse(
            token_ids=token_ids, max_model_len=limits.max_model_len
        )

    async def Detokenize(  # noqa: N802
        self,
        request: generation_pb2.DetokenizeRequest,
        context: Context,  # noqa: ARG002
    ) -> generation_pb2.DetokenizeResponse:
        """Turns tokens into text."""
        self._refuse_when_draining()
        self._accounts.of(caller()).call()
        model = self._resolve(request.model)
        limits = self._pool.limits(model)
        check_token_ids("token_ids", request.token_ids, limits.vocab_size)
        text = await self._tokenizers.decode(
            self._pool.tokenizer(model),
            list(request.token_ids),
            caller(),
            keep_special_tokens=request.keep_special_tokens,
        )
        return generation_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self,
        request: generation_pb2.ListModelsRequest,  # noqa: ARG002
        context: Context,  # noqa: ARG002
    ) -> generation_pb2.ListModelsResponse:
        """Lists the models that are served now and that the caller may use."""
        served = sorted(filter(caller().may_use, {e.info.model for e in self._pool.up()}))
        return generation_pb2.ListModelsResponse(
            models=[self._pool.card(model, self._admission.waiting(model)) for model in served]
        )

    async def drain(self, timeout: float) -> None:
        """Refuses new calls and waits for those in progress, `timeout` seconds at most.

        Those that are left then are failed with UNAVAILABLE.
        """
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drain timed out", requests=self._calls, seconds=timeout)
            self.fail_all("the router shut down before the request was complete; retry it")

    def fail_all(self, message: str) -> None:
        """Fails all requests in progress with UNAVAILABLE."""
        self._draining = True
        self._admission.refuse_all(rpc.unavailable(message))
        for request in self._requests:
            request.failed(rpc.unavailable(message))

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise rpc.unavailable("the router is shutting down; retry with another")

    def _resolve(self, name: str) -> str:
        """Returns the model that the caller means."""
        check_model(caller(), name)
        return self._pool.resolve(name, among=caller().models)

    async def _generate(
        self,
        call: "_Call",
        message: generation_pb2.GenerateRequest,
        usage: Usage,
        context: Context,
    ) -> None:
        remaining: float | None = context.time_remaining()
        call.deadline = None if remaining is None else call.arrival + remaining
        call.model = self._resolve(message.model)
        check_priority(caller(), message.priority)
        request = call.request = await self._prepare(call, message, usage)
        usage.reserve(self._most_tokens(request, message))
        call.trace.asked(request, message)
        self._requests.add(request)
        try:
            await self._serve(call, request, context)
        finally:
            self._requests.discard(request)

    async def _prepare(
        self, call: "_Call", message: generation_pb2.GenerateRequest, usage: Usage
    ) -> Request:
        """Validates and tokenizes."""
        limits = self._pool.limits(call.model)
        validation.check_request(message, limits)
        tokenizer = self._pool.tokenizer(call.model)
        if message.WhichOneof("prompt") == "tokens":
            prompt = list(message.tokens.token_ids)
        else:
            prompt = await self._tokenizers.encode(
                tokenizer, message, caller(), limits.max_model_len - 1
            )
        return Request(
            message,
            request_id=call.request_id,
            model=call.model,
            prompt=prompt,
            max_tokens=validation.output_length(message, len(prompt), limits),
            pieces=tokenizer.pieces,
            arrival=call.arrival,
            deadline=call.deadline,
            metrics=self.metrics.of(call.model),
            usage=usage,
            max_unread_tokens=self._settings.max_unread_tokens,
            pacer=self._pacer,
        )

    def _most_tokens(self, request: Request, message: generation_pb2.GenerateRequest) -> int:
        """Returns what a request may take of its tenant's tokens.

        Where the client does not say how many it wants, as many as are expected: all that the
        context leaves would be more than a minute's.
        """
        if message.stop.HasField("max_tokens"):
            return len(request.prompt) + len(request.outputs) * request.max_tokens
        return self._admission.expected_tokens(request.ticket)

    async def _serve(self, call: "_Call", request: Request, context: Context) -> None:
        """Waits for an engine, then passes on what it makes; again if it is lost meanwhile."""
        while not request.done:
            with call.trace.queue():
                grant = await self._admission.admit(request.ticket)
            engine = grant.engine
            call.engine = engine.address
            if call.queued is None:
                call.queued = time.monotonic() - call.arrival
                self.metrics.of(call.model).queue_time.observe(call.queued)
            try:
                with call.trace.attempt(engine.address) as trace_context:
                    await self._pass_on(call, request, engine, context, trace_context)
            except EngineLostError as error:
                if not self._may_move(request, engine, error):
                    raise
                request.moves += 1
                self.metrics.moves.labels(call.model).inc()
                log.warning(
                    "request migrates",
                    engine=engine.address,
                    reason=error.message,
                )
            finally:
                request.close()
                self._admission.release(grant)

    def _may_move(self, request: Request, engine: Engine, error: EngineLostError) -> bool:
        """Returns whether a request may go on at another engine; after a fault, only once."""
        if request.moves == self._settings.max_moves:
            return False
        if isinstance(error, EngineFaultError):
            if request.failed_on is not None or not self._pool.has_other(engine):
                return False
            request.failed_on = engine
        return True

    async def _pass_on(
        self,
        call: "_Call",
        request: Request,
        engine: Engine,
        context: Context,
        trace_context: dict[str, str],
    ) -> None:
        """Has an engine work on a request, and writes what comes until all is written."""
        timeout = None if call.deadline is None else call.deadline - time.monotonic()
        request.submit(engine.session, timeout, trace_context)
        self._pacer.streams += 1
        try:
            async with WriteLimit(self._settings.write_timeout) as limit:
                while not request.done:
                    await request.wait()
                    for response in request.take():
                        limit.begin()
                        await rpc.write(context, response)
                        limit.end()
        except TimeoutError:
            raise rpc.RpcError(
                grpc.StatusCode.CANCELLED,
                f"the client did not read its stream for {self._settings.write_timeout:g} s",
            ) from None
        finally:
            self._pacer.streams -= 1

    def _report(self, call: "_Call") -> None:
        """Counts and logs a call that has ended."""
        duration = time.monotonic() - call.arrival
        call.trace.end(call.request, call.outcome, call.message)
        self.metrics.requests.labels(call.model, call.outcome.name).inc()
        call.account.ended(call.outcome)
        if call.model:
            self.metrics.of(call.model).duration.observe(duration)
        request = call.request
        log.info(
            "request done",
            request_id=call.request_id,
            tenant=call.account.tenant.name,
            model=call.model,
            engine=call.engine,
            outcome=call.outcome.name,
            message=call.message,
            prompt_tokens=len(request.prompt) if request else 0,
            cached_tokens=request.cached_tokens if request else 0,
            output_tokens=request.output_tokens if request else 0,
            queued=_rounded(call.queued),
            ttft=_rounded(request.ttft if request else None),
            duration=_rounded(duration),
            moves=request.moves if request else 0,
        )


class _Call:
    """What is known of a Generate call, for its log line, however far it came."""

    def __init__(self, account: Account, tracing: Tracing, context: Context) -> None:
        self.account = account
        self.request_id = uuid.uuid4().hex
        self.model = ""
        self.engine = ""
        self.arrival = time.monotonic()
        self.trace = CallTrace(tracing, context, self.arrival)
        self.deadline: float | None = None
        self.queued: float | None = None
        self.request: Request | None = None
        self.outcome = grpc.StatusCode.INTERNAL
        self.message: str | None = None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
