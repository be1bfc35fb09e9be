"""Counts, logs and traces the calls of a router, whatever they ask for."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from dataclasses import dataclass
from functools import partial

import grpc
import structlog
from prometheus_client import CollectorRegistry
from structlog.contextvars import bound_contextvars

from octavo.common import rpc
from octavo.common.tracing import Tracing
from octavo.router.admission import Admission
from octavo.router.engines.engine import Engine
from octavo.router.engines.pool import EnginePool
from octavo.router.gen_ai_metrics import GenAiMetrics
from octavo.router.metrics import RouterMetrics
from octavo.router.on_demand import OnDemandModels
from octavo.router.requests import validation
from octavo.router.requests.embedding import EmbeddingState, Message
from octavo.router.requests.state import RequestState
from octavo.router.tenants.auth import check_model, check_priority
from octavo.router.tenants.quota import Account, RequestUsage
from octavo.router.tenants.tenant import Tenant
from octavo.router.tracing import RequestSpan
from octavo.v1 import generation_pb2

log = structlog.get_logger(__name__)

Metadata = Iterable[tuple[str, str | bytes]]
TellLoading = Callable[[str, int], Awaitable[None]]
"""Tells a client that its request waits until the model is loaded, and its queue position."""


@dataclass(slots=True)
class Call:
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


class CallTracker:
    """Counts calls against tenants' limits, ends them at their deadlines, logs and traces them.

    Args:
        pool: Knows the models.
        admission: Knows the number of waiting requests.
        registry: Registry for the metrics.
        tracing: Creates the spans of requests.
        on_demand: Models that are loaded when requests name them, if any.

    Attributes:
        metrics: The router's metrics.
        in_flight: Number of requests in progress.
    """

    def __init__(
        self,
        pool: EnginePool,
        admission: Admission[Engine],
        registry: CollectorRegistry,
        tracing: Tracing,
        on_demand: OnDemandModels | None = None,
    ) -> None:
        self._pool = pool
        self._on_demand = on_demand
        self._tracing = tracing
        self.metrics = RouterMetrics(
            registry, in_flight=lambda: self.in_flight, queued=lambda: len(admission)
        )
        self.in_flight = 0
        self._gen_ai_metrics = GenAiMetrics(registry)
        self._accounts: dict[str, Account] = {}  # by tenant name
        self._refusing = False
        self._waiting: set[asyncio.Timeout] = set()  # of calls that wait for a model
        self._reason = ""
        self._idle = asyncio.Event()
        self._idle.set()

    def count(self, name: str, tenant: Tenant) -> str:
        """Count a call that generates nothing against the tenant's limits; return its model.

        Raises:
            rpc.RpcError: The call was refused.
        """
        self._check_not_refusing()
        self._account(tenant).call()
        return self._resolve(name, tenant)

    @asynccontextmanager
    async def call(self, name: str, tenant: Tenant) -> AsyncIterator[str]:
        """Count a call, and keep its model loaded within the block; yield the model.

        Raises:
            rpc.RpcError: The call was refused, or the model cannot be loaded.
        """
        model = self.count(name, tenant)
        async with self._held(model):
            yield model

    @asynccontextmanager
    async def request(
        self,
        message: generation_pb2.GenerateRequest | Message,
        method: str,
        tenant: Tenant,
        timeout: float | None,
        metadata: Metadata,
        *,
        tell_loading: TellLoading | None = None,
    ) -> AsyncIterator[Call]:
        """Count, log and trace a request, which the block serves.

        Args:
            message: The client's request.
            method: Name of the RPC.
            tenant: The authenticated caller.
            timeout: Seconds until the client's deadline; None: no deadline.
            metadata: The call's metadata, which may hold a trace context.
            tell_loading: Tells the client that the model is being loaded.

        Raises:
            rpc.RpcError: The request was refused or failed.
        """
        arrival = time.monotonic()
        deadline = None if timeout is None else arrival + timeout
        account = self._account(tenant)
        span = RequestSpan(self._tracing, metadata, arrival, method)
        request_id, model = uuid.uuid4().hex, ""
        call: Call | None = None
        outcome, reason = grpc.StatusCode.INTERNAL, None
        self.in_flight += 1
        self._idle.clear()
        try:
            self._check_not_refusing()
            validation.check_request_id(message.request_id)
            request_id = message.request_id or request_id
            with bound_contextvars(request_id=request_id), account.request() as usage:
                model = self._resolve(message.model, tenant)
                check_priority(tenant, message.priority)
                async with _until(deadline), self._held(model, tell_loading):
                    call = Call(request_id, model, arrival, deadline, usage, span)
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
            self.in_flight -= 1
            if not self.in_flight:
                self._idle.set()
            state = None if call is None else call.state
            duration = time.monotonic() - arrival
            span.end(state, outcome, reason)
            account.ended(outcome)
            self.metrics.requests.labels(model, outcome.name).inc()
            if model:
                self.metrics.of(model).duration.observe(duration)
                self._gen_ai_metrics.ended(model, message, outcome, duration, state)
            line = partial(
                log.info,
                "request done",
                request_id=request_id,
                tenant=tenant.name,
                model=model,
                outcome=outcome.name,
                message=reason,
                duration=_rounded(duration),
                **_progress(state),
            )
            asyncio.get_running_loop().call_soon(line)  # after the answer, which need not wait

    async def until_idle(self) -> None:
        """Wait until no request is in progress."""
        await self._idle.wait()

    def refuse(self) -> None:
        """Refuse new calls."""
        self._refusing = True

    def fail_waiting(self, message: str) -> None:
        """Fail the calls that wait for a model with UNAVAILABLE."""
        self._reason = message
        for waiting in self._waiting:
            if not waiting.expired():
                waiting.reschedule(0.0)

    def _check_not_refusing(self) -> None:
        if self._refusing:
            raise rpc.unavailable("the router is shutting down; retry with another router")

    def _account(self, tenant: Tenant) -> Account:
        """Return a tenant's account, with the tenant's current limits."""
        if (account := self._accounts.get(tenant.name)) is None:
            account = self._accounts[tenant.name] = Account(tenant, self.metrics)
        account.tenant = tenant
        return account

    def _held(
        self, model: str, tell_loading: TellLoading | None = None
    ) -> AbstractAsyncContextManager[None]:
        """Return a context that loads a model on demand, and keeps it loaded."""
        if self._on_demand is None:
            return nullcontext()
        on_loading = None if tell_loading is None else partial(tell_loading, model)
        return self._hold(self._on_demand.hold(model, on_loading))

    @asynccontextmanager
    async def _hold(self, loaded: AbstractAsyncContextManager[None]) -> AsyncIterator[None]:
        """Enter a context that loads a model, which `fail_waiting` may interrupt.

        Raises:
            rpc.RpcError: See `OnDemandModels.hold`; UNAVAILABLE by `fail_waiting`.
        """
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(None) as waiting:
                    self._waiting.add(waiting)
                    await stack.enter_async_context(loaded)
            except TimeoutError:
                if not waiting.expired():
                    raise
                raise rpc.unavailable(self._reason) from None
            finally:
                self._waiting.discard(waiting)
            yield

    def _resolve(self, name: str, tenant: Tenant) -> str:
        """Return the full model name for `name` in a tenant's request."""
        check_model(tenant, self._pool.names_of(name), name)
        return self._pool.resolve(name, tenant.may_use)


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
