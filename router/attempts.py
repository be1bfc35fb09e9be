"""Runs a request on one engine after another until it is done: admission, hand-over, migration."""

import time
from collections.abc import Awaitable, Callable

import structlog

from octavo.common import rpc
from octavo.router.admission import Admission, Claim
from octavo.router.admission.claims import AnyState
from octavo.router.engines.engine import Engine
from octavo.router.engines.pool import EnginePool
from octavo.router.metrics import RouterMetrics
from octavo.router.requests.errors import EngineFaultError, EngineLostError
from octavo.router.tracing import RequestSpan

log = structlog.get_logger(__name__)

Attempt = Callable[[Claim[Engine], dict[str, str], str], Awaitable[None]]
"""Makes an attempt at a claim's engine, with a trace context and the address of the engine to copy
blocks from, if any."""


class Attempts:
    """Finds engines for requests, and others when these are lost or hand over.

    Args:
        pool: The engines.
        admission: Chooses each request's engine, and when it starts.
        metrics: The router's metrics.
        max_migrations: Maximum migrations per request.

    Attributes:
        requests: The requests that wait for an engine or run on one.
    """

    def __init__(
        self,
        pool: EnginePool,
        admission: Admission[Engine],
        metrics: RouterMetrics,
        max_migrations: int,
    ) -> None:
        self._pool = pool
        self._admission = admission
        self._metrics = metrics
        self._max_migrations = max_migrations
        self.requests: set[AnyState] = set()

    async def run(
        self,
        state: AnyState,
        attempt: Attempt,
        span: RequestSpan,
        on_queued: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        """Wait for an engine and make an attempt there, until the request is done.

        An attempt that returns before hands the request over to another engine, which has room for
        it; if the engine is lost, the request migrates.

        Args:
            state: The request.
            attempt: Makes one attempt.
            span: The request's span.
            on_queued: See `Admission.admit`.

        Raises:
            rpc.RpcError: The request was refused or failed.
        """
        request = state.request
        last: Engine | None = None
        next_: Claim[Engine] | None = None
        self.requests.add(state)
        try:
            while not state.done:
                claim, next_ = next_, None
                if claim is None:
                    with span.queue():
                        claim = await self._admission.admit(state, on_queued)
                if state.queue_time is None:
                    state.queue_time = time.monotonic() - request.arrival
                    self._metrics.of(request.model).queue_time.observe(state.queue_time)
                engine = claim.engine
                try:
                    with span.attempt(engine.address) as trace_context:
                        source = self._pool.block_source(claim, engine, last)
                        await attempt(claim, trace_context, source)
                    if not state.done:
                        state.handed_over = True
                        next_ = self._admission.hand_over(claim)
                        self._metrics.handovers.labels(request.model).inc()
                except EngineLostError as error:
                    if not self._may_migrate(state, engine, error):
                        raise
                    state.migrations += 1
                    self._metrics.migrations.labels(request.model).inc()
                    log.warning("request migrates", engine=engine.address, reason=error.message)
                finally:
                    last = engine
                    self._admission.release(claim)
        finally:
            self.requests.discard(state)

    def fail_all(self, error: rpc.RpcError) -> None:
        """Fail all requests, waiting ones too."""
        self._admission.refuse_all(error)
        for state in self.requests:
            state.fail(error)

    def _may_migrate(self, state: AnyState, engine: Engine, error: EngineLostError) -> bool:
        """Return whether a request may migrate to another engine; only once after a failed step."""
        if state.migrations == self._max_migrations:
            return False
        if isinstance(error, EngineFaultError):
            if state.failed_on is not None or not self._pool.has_other(engine, state.request.model):
                return False
            state.failed_on = engine
        return True
