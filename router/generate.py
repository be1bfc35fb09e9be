"""Serves requests from gRPC and HTTP clients alike."""

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import grpc
import structlog
from prometheus_client import CollectorRegistry
from structlog.contextvars import bound_contextvars

from octavo.common import rpc
from octavo.common.background import start
from octavo.common.limits import check_token_ids
from octavo.common.tracing import Tracing
from octavo.router.admission import Admission, Claim
from octavo.router.engines.engine import Engine
from octavo.router.engines.pool import EnginePool
from octavo.router.gen_ai_metrics import GenAiMetrics
from octavo.router.metrics import RouterMetrics
from octavo.router.requests import validation
from octavo.router.requests.defaults import fill_in
from octavo.router.requests.embedding import (
    EmbeddingRequest,
    EmbeddingState,
    check_embed_request,
    check_text_length,
    prompt_of,
)
from octavo.router.requests.errors import EngineFaultError, EngineLostError
from octavo.router.requests.held_schemas import held_schemas
from octavo.router.requests.output_plan import OutputFormats, OutputPlan
from octavo.router.requests.pacing import limited, message_interval
from octavo.router.requests.request import Request
from octavo.router.requests.schema_checker import SchemaChecker
from octavo.router.requests.state import RequestState
from octavo.router.settings import RouterSettings
from octavo.router.tenants.auth import check_model, check_priority
from octavo.router.tenants.quota import Account, RequestUsage
from octavo.router.tenants.tenant import Tenant
from octavo.router.text.tokenization import Tokenizers
from octavo.router.tracing import RequestSpan
from octavo.v1 import generation_pb2

log = structlog.get_logger(__name__)

LARGE_BYTES = 32_768
"""Total bytes of schemas above which a thread parses them."""
TAIL_TOKENS = 256
"""Tokens at a prompt's end that are searched for markers of reasoning or an answer."""

T = TypeVar("T")
Write = Callable[[generation_pb2.GenerateResponse], Awaitable[None]]
"""Sends one response to the client; returns when the client can take the next."""
Prefetches = list[asyncio.Task[None]]
Attempt = Callable[[Claim[Engine], dict[str, str], str, Prefetches], Awaitable[None]]
Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(slots=True)
class _Call:
    """A call in progress.

    Attributes:
        request_id: Id in responses, logs and traces.
        model: Resolved model name.
        arrival: Monotonic time of arrival, in seconds.
        deadline: Monotonic time of the client's deadline; None: no deadline.
        usage: Counts the tenant's tokens.
        span: The request's span.
        state: The request, once it is valid.
    """

    request_id: str
    model: str
    arrival: float
    deadline: float | None
    usage: RequestUsage
    span: RequestSpan
    state: RequestState | EmbeddingState | None = None


class Generator:
    """Serves authenticated tenants' requests on the engines of a pool.

    Args:
        settings: Limits and timeouts.
        pool: The engines.
        admission: Chooses each request's engine, and when it starts.
        tokenizers: Run the pool's tokenizers.
        registry: Registry for the metrics.
        tracing: Creates the spans of requests.
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
        self._requests: set[RequestState | EmbeddingState] = set()
        self._draining = False
        self._formats = OutputFormats(settings.tool_parser, settings.reasoning_parser)
        self._checker = SchemaChecker()
        self._streams = 0
        self._interval = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self.metrics = RouterMetrics(
            registry, in_flight=lambda: self._calls, queued=lambda: len(admission)
        )
        self._gen_ai_metrics = GenAiMetrics(registry)
        self._accounts: dict[str, Account] = {}  # by tenant name

    @property
    def in_flight(self) -> int:
        """Number of `generate` calls in progress."""
        return self._calls

    async def generate(
        self,
        message: generation_pb2.GenerateRequest,
        write: Write,
        *,
        tenant: Tenant,
        timeout: float | None = None,
        metadata: Metadata = (),
        accept_queued: bool = False,
    ) -> None:
        """Validate and tokenize a request, admit it, stream its outputs; migrate it if necessary.

        Args:
            message: The client's request.
            write: Sends a response to the client.
            tenant: The authenticated caller.
            timeout: Seconds until the client's deadline; None: no deadline.
            metadata: The call's metadata, which may hold a trace context.
            accept_queued: Whether to write Accepted as soon as the request is queued.

        Raises:
            rpc.RpcError: The request was refused or failed.
        """
        async with self._call(message, "Generate", tenant, timeout, metadata) as call:
            state = call.state = await self._prepare(message, call)
            call.usage.reserve(self._tokens_to_reserve(state))
            call.span.describe(state.request)
            on_queued = partial(_accept_queued, state, write) if accept_queued else None
            await self._serve(
                state, partial(self._stream, state, write=write), call.span, on_queued
            )

    async def embed(
        self,
        message: generation_pb2.EmbedRequest,
        *,
        tenant: Tenant,
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> generation_pb2.EmbedResponse:
        """Validate and tokenize texts, admit them and return their embeddings.

        Args:
            message: The client's request.
            tenant: The authenticated caller.
            timeout: Seconds until the client's deadline; None: no deadline.
            metadata: The call's metadata, which may hold a trace context.

        Raises:
            rpc.RpcError: The request was refused or failed.
        """
        async with self._call(message, "Embed", tenant, timeout, metadata) as call:
            request, dimensions = await self._prepare_embedding(message, call)
            state = call.state = EmbeddingState(request)
            call.usage.reserve(len(request.prompt))
            call.span.describe(request)
            await self._serve(state, partial(self._embed, state), call.span)
            assert state.embeddings is not None, "it is done"
            call.usage.prompt(len(request.prompt))
            self.metrics.of(call.model).prompt_tokens.inc(len(request.prompt))
            return generation_pb2.EmbedResponse(
                request_id=request.request_id,
                model=request.model,
                embeddings=state.embeddings,
                dimensions=dimensions,
                token_counts=request.lengths,
            )

    @asynccontextmanager
    async def _call(
        self,
        message: generation_pb2.GenerateRequest | generation_pb2.EmbedRequest,
        method: str,
        tenant: Tenant,
        timeout: float | None,
        metadata: Metadata,
    ) -> "AsyncIterator[_Call]":
        """Count, log and trace a call, which the block serves.

        Raises:
            rpc.RpcError: The call was refused or failed.
        """
        arrival = time.monotonic()
        deadline = None if timeout is None else arrival + timeout
        account = self._account(tenant)
        span = RequestSpan(self._tracing, metadata, arrival, method)
        request_id, model = uuid.uuid4().hex, ""
        call: _Call | None = None
        outcome, reason = grpc.StatusCode.INTERNAL, None
        self._calls += 1
        self._idle.clear()
        try:
            self._refuse_when_draining()
            validation.check_request_id(message.request_id)
            request_id = message.request_id or request_id
            with bound_contextvars(request_id=request_id), account.request() as usage:
                model = self._resolve(message.model, tenant)
                check_priority(tenant, message.priority)
                call = _Call(request_id, model, arrival, deadline, usage, span)
                async with _until(deadline):
                    yield call
            outcome = grpc.StatusCode.OK
        except rpc.RpcError as error:
            outcome, reason = error.code, error.message
            raise
        except asyncio.CancelledError:
            late = deadline is not None and time.monotonic() >= deadline
            outcome = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
            raise
        except Exception as error:
            log.exception("request failed", request_id=request_id)
            raise rpc.RpcError(grpc.StatusCode.INTERNAL, rpc.UNEXPECTED) from error
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
            state = None if call is None else call.state
            duration = time.monotonic() - arrival
            span.end(state, outcome, reason)
            account.ended(outcome)
            self.metrics.requests.labels(model, outcome.name).inc()
            if model:
                self.metrics.of(model).duration.observe(duration)
                self._gen_ai_metrics.ended(model, message, outcome, duration, state)
            log.info(
                "request done",
                request_id=request_id,
                tenant=tenant.name,
                model=model,
                outcome=outcome.name,
                message=reason,
                duration=_rounded(duration),
                **_progress(state),
            )

    async def tokenize(
        self, message: generation_pb2.TokenizeRequest, tenant: Tenant
    ) -> generation_pb2.TokenizeResponse:
        """Return the token ids of a text or a chat.

        Raises:
            rpc.RpcError: The call was refused.
        """
        model = self._count_call(message.model, tenant)
        limits = self._pool.limits(model)
        validation.check_chat(message, limits)
        token_ids = await self._tokenizers.encode(self._pool.tokenizer(model), message, tenant)
        return generation_pb2.TokenizeResponse(
            token_ids=token_ids, max_model_len=limits.max_model_len
        )

    async def detokenize(
        self, message: generation_pb2.DetokenizeRequest, tenant: Tenant
    ) -> generation_pb2.DetokenizeResponse:
        """Return the text of token ids.

        Raises:
            rpc.RpcError: The call was refused.
        """
        model = self._count_call(message.model, tenant)
        check_token_ids("token_ids", message.token_ids, self._pool.limits(model).vocab_size)
        text = await self._tokenizers.decode(
            self._pool.tokenizer(model),
            list(message.token_ids),
            tenant,
            keep_special_tokens=message.keep_special_tokens,
        )
        return generation_pb2.DetokenizeResponse(text=text)

    def list_models(self, tenant: Tenant) -> generation_pb2.ListModelsResponse:
        """Return the models that are served now and that the tenant may use."""
        up = {model for engine in self._pool.up() for model in engine.models}
        names = self._pool.names()
        served = [model for model in sorted(up) if tenant.may_use(names[model])]
        return generation_pb2.ListModelsResponse(
            models=[self._pool.card(model, self._admission.waiting(model)) for model in served]
        )

    async def drain(self, timeout: float) -> None:
        """Wait for the calls in progress; fail the rest after `timeout` seconds with UNAVAILABLE.

        Also serve calls that clients sent before they noticed the drain.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drain timed out", requests=self._calls, seconds=timeout)
            self.fail_all("the router shut down before the request was complete; retry it")

    def fail_all(self, message: str) -> None:
        """Fail all requests in progress with UNAVAILABLE, and refuse new calls."""
        self._draining = True
        self._admission.refuse_all(rpc.unavailable(message))
        for state in self._requests:
            state.fail(rpc.unavailable(message))

    async def close(self) -> None:
        """End the process that checks outputs against schemas."""
        await self._checker.close()

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise rpc.unavailable("the router is shutting down; retry with another router")

    def _account(self, tenant: Tenant) -> Account:
        """Return a tenant's account, with the tenant's current limits."""
        if (account := self._accounts.get(tenant.name)) is None:
            account = self._accounts[tenant.name] = Account(tenant, self.metrics)
        account.tenant = tenant
        return account

    def _count_call(self, model: str, tenant: Tenant) -> str:
        """Count a call without generation against the tenant's limits; return its model."""
        self._refuse_when_draining()
        self._account(tenant).call()
        return self._resolve(model, tenant)

    def _resolve(self, name: str, tenant: Tenant) -> str:
        """Return the full model name for `name` in a tenant's request."""
        check_model(tenant, self._pool.names_of(name), name)
        return self._pool.resolve(name, tenant.may_use)

    async def _prepare(
        self, message: generation_pb2.GenerateRequest, call: "_Call"
    ) -> RequestState:
        """Validate and tokenize."""
        model, usage = call.model, call.usage
        if self._pool.embedding(model) is not None:
            raise rpc.invalid(
                "model", f"model {model!r} embeds texts and generates none: use Embed"
            )
        limits, tokenizer = self._pool.limits(model), self._pool.tokenizer(model)
        sampling, max_tokens = self._pool.defaults(model)
        fill_in(message, sampling)
        validation.check_request(message, limits)
        if message.HasField("chat"):
            self._formats.check(message.chat, tokenizer.model)
        if message.WhichOneof("prompt") == "tokens":
            token_ids = list(message.tokens.token_ids)
        else:
            token_ids = await self._tokenizers.encode(
                tokenizer, message, usage.tenant, limits.max_model_len - 1
            )
            validation.check_vocabulary(message, token_ids, tokenizer.pieces, limits)
        plan = await self._plan(message, model, token_ids)
        if plan is not None and plan.checks is not None:
            await self._checker.check_schemas(plan.checks)
        adapter = self._pool.adapter(model)
        seeded = message.sampling.HasField("seed")
        request = Request(
            request_id=call.request_id,
            model=model,
            tenant=usage.tenant,
            message=message,
            prompt=token_ids,
            salt=usage.tenant.salt(message.cache_salt),
            adapter="" if adapter is None else adapter.name,
            adapter_digest="" if adapter is None else adapter.digest,
            max_tokens=validation.output_length(message, len(token_ids), limits, max_tokens),
            arrival=call.arrival,
            deadline=call.deadline,
            seed=message.sampling.seed if seeded else secrets.randbits(64),
            plan=plan,
        )
        return RequestState(
            request,
            tokenizer.pieces,
            usage=usage,
            metrics=self.metrics.of(model),
            message_interval=lambda: self._interval,
            max_unread_tokens=self._settings.max_unread_tokens,
        )

    async def _prepare_embedding(
        self, message: generation_pb2.EmbedRequest, call: "_Call"
    ) -> tuple[EmbeddingRequest, int]:
        """Validate and tokenize; return the request and the dimensions of its embeddings."""
        model, tenant = call.model, call.usage.tenant
        info, limits = self._pool.embedding(model), self._pool.limits(model)
        if info is None:
            raise rpc.invalid("model", f"model {model!r} generates text and does not embed it")
        check_embed_request(message, limits, info)
        if message.texts:
            prompt = prompt_of(message, info)
            token_ids = await self._tokenizers.encode_texts(
                self._pool.tokenizer(model),
                [prompt + text for text in message.texts],
                tenant,
                limits.max_model_len,
                truncate=message.truncate,
            )
        else:
            most = limits.max_model_len if message.truncate else None
            token_ids = [list(tokens.token_ids[:most]) for tokens in message.tokens]
        field = "texts" if message.texts else "tokens"
        lengths = [len(each) for each in token_ids]
        for number, length in enumerate(lengths):
            check_text_length(f"{field}[{number}]", length, limits)
        request = EmbeddingRequest(
            request_id=call.request_id,
            model=model,
            tenant=tenant,
            message=message,
            prompt=list(chain.from_iterable(token_ids)),
            lengths=lengths,
            arrival=call.arrival,
            deadline=call.deadline,
        )
        return request, message.dimensions or info.dimensions

    async def unenforced(self, message: generation_pb2.GenerateRequest) -> Sequence[str]:
        """Return the parts of its schemas that are not enforced; the request need not be valid."""
        checks = (await _planned(message, partial(held_schemas, message))).checks
        return () if checks is None else checks.unenforced

    async def _plan(
        self, message: generation_pb2.GenerateRequest, model: str, token_ids: Sequence[int]
    ) -> OutputPlan | None:
        """Return how to parse and constrain outputs; None: plain text."""
        chat = message.HasField("chat")
        bounded = message.stop.HasField("max_reasoning_tokens")  # valid for chats only
        if not (chat or bounded or message.HasField("constraint")):
            return None
        tokenizer = self._pool.tokenizer(model)
        tail = tokenizer.decode(token_ids[-TAIL_TOKENS:], keep_special_tokens=True) if chat else ""
        plan = partial(
            self._formats.plan,
            message,
            tokenizer.model,
            tail,
            self._pool.eos_token_ids(model),
            self._pool.limits(model),
        )
        return await _planned(message, plan)

    def _tokens_to_reserve(self, state: RequestState) -> int:
        """Return the number of tokens that a request reserves from its tenant's quota.

        Without max_tokens, reserve the expected length: the rest of the context could exceed a
        minute's quota.
        """
        request = state.request
        if request.message.stop.HasField("max_tokens"):
            return len(request.prompt) + request.num_outputs * request.max_tokens
        return self._admission.expected_tokens(state)

    async def _serve(
        self,
        state: RequestState | EmbeddingState,
        attempt: Attempt,
        span: RequestSpan,
        on_queued: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """Wait for an engine and make an attempt there; migrate if the engine is lost.

        Args:
            state: The request.
            attempt: Makes an attempt at an engine, with the trace context and the source of blocks.
            span: The request's span.
            on_queued: See `Admission.admit`.
        """
        request = state.request
        last: Engine | None = None
        next_: Claim[Engine] | None = None
        prefetches: Prefetches = []
        self._requests.add(state)
        try:
            while not state.done:
                claim, next_ = next_, None
                if claim is None:
                    with span.queue():
                        claim = await self._admission.admit(state, on_queued)
                if state.queue_time is None:
                    state.queue_time = time.monotonic() - request.arrival
                    self.metrics.of(request.model).queue_time.observe(state.queue_time)
                engine = claim.engine
                try:
                    with span.attempt(engine.address) as trace_context:
                        source = self._pool.block_source(claim, engine, last)
                        await attempt(claim, trace_context, source, prefetches)
                    if not state.done:
                        state.handed_over = True
                        next_ = self._admission.hand_over(claim)
                        self.metrics.handovers.labels(request.model).inc()
                except EngineLostError as error:
                    if not self._may_migrate(state, engine, error):
                        raise
                    state.migrations += 1
                    self.metrics.migrations.labels(request.model).inc()
                    log.warning("request migrates", engine=engine.address, reason=error.message)
                finally:
                    last = engine
                    self._admission.release(claim)
        finally:
            self._requests.discard(state)
            for prefetch in prefetches:
                prefetch.cancel()

    def _may_migrate(
        self, state: RequestState | EmbeddingState, engine: Engine, error: EngineLostError
    ) -> bool:
        """Return whether a request may migrate to another engine; only once after a failed step."""
        if state.migrations == self._settings.max_migrations:
            return False
        if isinstance(error, EngineFaultError):
            if state.failed_on is not None or not self._pool.has_other(engine, state.request.model):
                return False
            state.failed_on = engine
        return True

    async def _embed(self, state: EmbeddingState, claim: Claim[Engine], *_: object) -> None:
        """Have an engine embed a request's texts."""
        deadline = state.request.deadline
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        await claim.engine.embed(state, left)

    async def _stream(
        self,
        state: RequestState,
        claim: Claim[Engine],
        trace_context: dict[str, str],
        block_source: str,
        prefetches: Prefetches,
        *,
        write: Write,
    ) -> None:
        """Run a request's attempt on an engine: stream its responses until they end.

        A prefill engine's attempt ends after the first token, once another engine has room. Before,
        that engine is told to copy the prompt's blocks, by one of `prefetches`.
        """
        engine = claim.engine
        checked = state.request.checks is not None
        submit = state.begin_attempt(engine.address, trace_context)
        submit.kv_source = block_source
        session_id = engine.submit(state, submit)
        self._count_streams(1)
        try:
            async with limited(write, self._settings.write_timeout) as write_in_time:
                while not state.done:
                    await state.wait()
                    for response in state.take():
                        if checked and response.HasField("finished"):
                            await self._check(state, response.finished)
                        await write_in_time(response)
                    if not engine.prefills or not state.accepted:
                        continue
                    successor = self._admission.successor(claim)
                    if successor is not None and state.begun:
                        return
                    if successor is not None and not prefetches:
                        work = successor.prefetch(state.request, engine.address)
                        prefetches.append(start(work, f"prefetch:{state.request.request_id}"))
        except TimeoutError:
            raise rpc.RpcError(
                grpc.StatusCode.CANCELLED,
                f"the client did not read its stream for {self._settings.write_timeout:g} s",
            ) from None
        finally:
            self._count_streams(-1)
            state.end_attempt()
            engine.end(session_id)

    def _count_streams(self, change: int) -> None:
        """Count a stream that begins or ends, which changes the interval between messages."""
        self._streams += change
        self._interval = message_interval(self._streams)

    async def _check(self, state: RequestState, finished: generation_pb2.Finished) -> None:
        """Add the schema violations of a finished output."""
        output = state.outputs[finished.index]
        finished.schema_errors.extend(await self._checker.errors(output.unchecked()))


async def _accept_queued(state: RequestState, write: Write, position: int) -> None:
    if (response := state.accept_queued(position)) is not None:
        await write(response)


async def _planned(message: generation_pb2.GenerateRequest, plan: Callable[[], T]) -> T:
    """Parse a request's schemas, in a thread if they are large."""
    tools = sum(tool.ByteSize() for tool in message.chat.tools)
    large = message.constraint.ByteSize() + tools > LARGE_BYTES
    return await asyncio.to_thread(plan) if large else plan()


@asynccontextmanager
async def _until(deadline: float | None) -> AsyncIterator[None]:
    """Cancel the block at a deadline of the monotonic clock.

    Raises:
        rpc.RpcError: DEADLINE_EXCEEDED.
    """
    try:
        async with asyncio.timeout(None if deadline is None else deadline - time.monotonic()):
            yield
    except TimeoutError:
        raise rpc.RpcError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            "the deadline passed before the request was complete",
        ) from None


def _progress(state: RequestState | EmbeddingState | None) -> dict[str, str | float | None]:
    """Return log fields for a request's progress; none if it was refused."""
    if state is None:
        return {}
    return {
        "engine": state.engine,
        "prompt_tokens": len(state.request.prompt),
        "cached_tokens": state.cached_tokens,
        "output_tokens": state.output_tokens,
        "queued": _rounded(state.queue_time),
        "ttft": _rounded(state.ttft),
        "migrations": state.migrations,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
