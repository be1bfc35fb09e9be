"""Serves requests from gRPC and HTTP clients alike.

A call is tracked (`call_tracker.py`), its message made a request (`prepare.py`), the request run on
engines (`attempts.py`), and each attempt streamed to the client, here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import grpc
import structlog
from prometheus_client import CollectorRegistry

from octavo.common import rpc
from octavo.common.background import start
from octavo.common.limits import check_token_ids
from octavo.common.tracing import Tracing
from octavo.router.admission import Admission, Claim
from octavo.router.attempts import Attempts
from octavo.router.call_tracker import CallTracker, Metadata
from octavo.router.embed import Embedder
from octavo.router.engines.engine import Engine
from octavo.router.engines.pool import EnginePool
from octavo.router.metrics import RouterMetrics
from octavo.router.on_demand import OnDemandModels
from octavo.router.prepare import Preparer
from octavo.router.requests import validation
from octavo.router.requests.pacing import limited, message_interval
from octavo.router.requests.schema_checker import SchemaChecker
from octavo.router.requests.state import RequestState
from octavo.router.settings import RouterSettings
from octavo.router.tenants.tenant import Tenant
from octavo.router.text.tokenization import Tokenizers
from octavo.v1 import generation_pb2

log = structlog.get_logger(__name__)

Write = Callable[[generation_pb2.GenerateResponse], Awaitable[None]]
"""Sends one response to the client; returns when the client can take the next."""


class Generator:
    """Serves authenticated tenants' requests on the engines of a pool.

    Args:
        settings: Limits and timeouts.
        pool: The engines.
        admission: Chooses each request's engine, and when it starts.
        tokenizers: Run the pool's tokenizers.
        registry: Registry for the metrics.
        tracing: Creates the spans of requests.
        on_demand: Models that are loaded when requests name them, if any.

    Attributes:
        embedder: Serves the requests for embeddings.
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
        on_demand: OnDemandModels | None = None,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._admission = admission
        self._tokenizers = tokenizers
        self._on_demand = on_demand
        self._calls = CallTracker(pool, admission, registry, tracing, on_demand)
        self._attempts = Attempts(pool, admission, self.metrics, settings.max_migrations)
        self._checker = SchemaChecker()
        self._preparer = Preparer(settings, pool, tokenizers, self._checker)
        self.embedder = Embedder(pool, tokenizers, self._calls, self._attempts)
        self._streams = 0
        self._interval = 0.0

    @property
    def metrics(self) -> RouterMetrics:
        """The router's metrics."""
        return self._calls.metrics

    @property
    def in_flight(self) -> int:
        """Number of requests in progress."""
        return self._calls.in_flight

    async def generate(
        self,
        message: generation_pb2.GenerateRequest,
        write: Write,
        *,
        tenant: Tenant,
        timeout: float | None = None,
        metadata: Metadata = (),
        tell_waiting: bool = False,
    ) -> None:
        """Validate and tokenize a request, admit it, stream its outputs; migrate it if necessary.

        Args:
            message: The client's request.
            write: Sends a response to the client.
            tenant: The authenticated caller.
            timeout: Seconds until the client's deadline; None: no deadline.
            metadata: The call's metadata, which may hold a trace context.
            tell_waiting: Whether to write Loading while the model is loaded, and Accepted as soon
                as the request is queued.

        Raises:
            rpc.RpcError: The request was refused or failed.
        """
        tell_loading = partial(_tell_loading, write) if tell_waiting else None
        async with self._calls.request(
            message, "Generate", tenant, timeout, metadata, tell_loading=tell_loading
        ) as call:
            request = await self._preparer.prepare(message, call)
            state = call.state = RequestState(
                request,
                self._pool.tokenizer(call.model).pieces,
                usage=call.usage,
                metrics=self.metrics.of(call.model),
                message_interval=lambda: self._interval,
                max_unread_tokens=self._settings.max_unread_tokens,
            )
            call.usage.reserve(self._tokens_to_reserve(state))
            call.span.describe(request)
            on_queued = partial(_accept_queued, state, write) if tell_waiting else None
            prefetches: list[asyncio.Task[None]] = []
            attempt = partial(self._stream, state, write=write, prefetches=prefetches)
            try:
                await self._attempts.run(state, attempt, call.span, on_queued)
            finally:
                for prefetch in prefetches:
                    prefetch.cancel()

    async def unenforced(self, message: generation_pb2.GenerateRequest) -> Sequence[str]:
        """Return the parts of its schemas that are not enforced; the request need not be valid."""
        return await self._preparer.unenforced(message)

    async def tokenize(
        self, message: generation_pb2.TokenizeRequest, tenant: Tenant
    ) -> generation_pb2.TokenizeResponse:
        """Return the token ids of a text or a chat.

        Raises:
            rpc.RpcError: The call was refused.
        """
        async with self._calls.call(message.model, tenant) as model:
            limits, tokenizer = self._pool.limits(model), self._pool.tokenizer(model)
            validation.check_chat(message, limits)
            images = await self._preparer.read_images(message.chat, model, tenant)
            texts = [image.text for image in images]
            token_ids = await self._tokenizers.encode(tokenizer, message, tenant, images=texts)
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
        async with self._calls.call(message.model, tenant) as model:
            check_token_ids("token_ids", message.token_ids, self._pool.limits(model).vocab_size)
            text = await self._tokenizers.decode(
                self._pool.tokenizer(model),
                list(message.token_ids),
                tenant,
                keep_special_tokens=message.keep_special_tokens,
            )
        return generation_pb2.DetokenizeResponse(text=text)

    def list_models(self, tenant: Tenant) -> generation_pb2.ListModelsResponse:
        """Return the models that the tenant may use: those served now, and those to be loaded."""
        up = {model for engine in self._pool.up() for model in engine.models}
        names = self._pool.names()
        usable = [m for m in sorted(up | {*self._pool.offered}) if tenant.may_use(names[m])]
        return generation_pb2.ListModelsResponse(
            models=[self._card(model, names[model][1:], up=model in up) for model in usable]
        )

    def missing(self, name: str, tenant: Tenant) -> rpc.RpcError:
        """Return the error of a name that `list_models` does not have."""
        return self._pool.missing(name, tenant.may_use)

    def _card(self, model: str, aliases: Sequence[str], *, up: bool) -> generation_pb2.ModelCard:
        """Return a model's card."""
        if up:
            card = self._pool.card(model, self._admission.waiting(model))
        else:
            card = generation_pb2.ModelCard(name=model, aliases=aliases)
        if self._on_demand is not None:
            card.state = self._on_demand.state(model)
        return card

    async def unload(self, name: str, tenant: Tenant) -> None:
        """Unload a model that is loaded on demand, once its requests are complete.

        Raises:
            rpc.RpcError: It is not such a model, or it is pinned.
        """
        model = self._calls.count(name, tenant)
        if self._on_demand is None:
            raise rpc.not_found("model", f"model {model!r} is not loaded on demand")
        await self._on_demand.unload(model)

    async def drain(self, timeout: float) -> None:
        """Wait for the calls in progress; fail the rest after `timeout` seconds with UNAVAILABLE.

        Also serve calls that clients sent before they noticed the drain.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._calls.until_idle()
        except TimeoutError:
            log.warning("drain timed out", requests=self.in_flight, seconds=timeout)
            self.fail_all("the router shut down before the request was complete; retry it")

    def fail_all(self, message: str) -> None:
        """Fail all requests in progress with UNAVAILABLE, and refuse new calls."""
        self._calls.refuse()
        self._calls.fail_waiting(message)
        self._attempts.fail_all(rpc.unavailable(message))

    async def close(self) -> None:
        """End the process that checks outputs against schemas, and the threads that read images."""
        self._preparer.close()
        await self._checker.close()

    def _tokens_to_reserve(self, state: RequestState) -> int:
        """Return the number of tokens that a request reserves from its tenant's quota.

        Without max_tokens, reserve the expected length: the rest of the context could exceed a
        minute's quota.
        """
        request = state.request
        if request.message.stop.HasField("max_tokens"):
            return len(request.prompt) + request.num_outputs * request.max_tokens
        return self._admission.expected_tokens(state)

    async def _stream(
        self,
        state: RequestState,
        claim: Claim[Engine],
        trace_context: dict[str, str],
        block_source: str,
        *,
        write: Write,
        prefetches: list[asyncio.Task[None]],
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
                    if successor is not None and not prefetches and not state.request.images:
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


async def _tell_loading(write: Write, model: str, position: int) -> None:
    loading = generation_pb2.Loading(model=model, queue_position=position)
    await write(generation_pb2.GenerateResponse(loading=loading))
