"""The connection to one engine address: connect, get the engine's information, detect its loss."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import grpc.aio
import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type
from tenacity.wait import wait_random_exponential

from octavo.common import rpc, tls
from octavo.router.engines.breaker import CircuitBreaker
from octavo.router.engines.engine import Engine
from octavo.router.settings import RouterSettings
from octavo.router.text.tokenization import TokenizerError, Tokenizers
from octavo.v1 import engine_pb2, engine_pb2_grpc

log = structlog.get_logger(__name__)

BACKOFF = wait_random_exponential(multiplier=0.25, min=0.05, max=1.0)
"""Seconds between connection attempts; short, as a returning engine is needed."""
UNUSABLE_SECONDS = 15.0
"""Seconds between attempts with a reachable but unusable engine: a person must fix it."""


class _DisconnectedError(Exception):
    """The engine could not be reached, or sent no message."""


class _UnusableError(_DisconnectedError):
    """The engine was reached, but is unusable for this router."""


class EngineLink:
    """Keeps the router connected to one address.

    Attributes:
        address: HOST:PORT.
        engine: The current or last connection; None before the first.
        draining: Whether the router sends it no new requests, regardless of the engine's own
            report.
        breaker: Decides how long other engines are preferred after failures.
        problem: Reason why the engine is reachable but unusable; else empty.
        added: When it was added, by `time.monotonic`.
    """

    def __init__(
        self,
        address: str,
        settings: RouterSettings,
        tokenizers: Tokenizers,
        on_change: Callable[[str], None],
        on_load: Callable[[str], None],
    ) -> None:
        self.address = address
        self.engine: Engine | None = None
        self.draining = False
        self.problem = ""
        self.added = time.monotonic()
        self._settings = settings
        self._tokenizers = tokenizers
        self._on_change = on_change
        self._on_load = on_load
        self.breaker = CircuitBreaker()
        self._options = rpc.channel_options(
            keepalive_time=settings.keepalive_time, keepalive_timeout=settings.keepalive_timeout
        )

    @property
    def up(self) -> Engine | None:
        """The connection, if it is alive."""
        engine = self.engine
        return engine if engine is not None and engine.up and not engine.broken else None

    @property
    def taking(self) -> Engine | None:
        """The connection, if it is alive and accepts requests."""
        engine = self.up
        drains = self.draining or (engine is not None and engine.load.draining)
        return None if drains else engine

    @property
    def doubtful(self) -> bool:
        """Whether to prefer other engines: this one failed recently, or its step may hang."""
        if self.breaker.remaining:
            return True
        limit = self._settings.heartbeat_timeout
        return self.engine is not None and self.engine.load.step_running_seconds > limit

    @property
    def sequences(self) -> int:
        """Number of unfinished sequences that this router sent to the engine."""
        return self.engine.sequences if self.engine is not None else 0

    async def run(self) -> None:
        """Connect and reconnect until cancelled."""
        while True:
            async for attempt in AsyncRetrying(
                wait=_wait,
                retry=retry_if_exception_type(_DisconnectedError),
                before_sleep=self._tell,
            ):
                with attempt:
                    await self._hold()

    async def _hold(self) -> None:
        """Connect, and run the session; return when a usable connection ends.

        Raises:
            _DisconnectedError: The engine never became usable.
        """
        async with self._open_channel() as channel:
            engine = await self._connect(channel)
            try:
                reason = await engine.run()
            finally:
                was_up, engine.up = engine.up, False
                if was_up:
                    self._changed(engine.models)
        if not was_up:
            raise _DisconnectedError(reason)
        if not engine.load.draining:
            self.breaker.trip()
        passed_over = round(self.breaker.remaining, 1)
        log.warning("engine down", engine=self.address, reason=reason, passed_over=passed_over)

    def _open_channel(self) -> grpc.aio.Channel:
        """Open a channel with the current certificates.

        Raises:
            _DisconnectedError: The certificates cannot be used.
        """
        files = self._settings.engine_tls
        if files is None:
            return grpc.aio.insecure_channel(self.address, options=self._options)
        try:
            credentials = tls.channel_credentials(files)
        except tls.TlsError as error:
            raise _DisconnectedError(str(error)) from error
        options = [*self._options, *tls.channel_options(files)]
        return grpc.aio.secure_channel(self.address, credentials, options=options)

    async def _connect(self, channel: grpc.aio.Channel) -> Engine:
        stub: engine_pb2_grpc.EngineServiceAsyncStub
        stub = engine_pb2_grpc.EngineServiceStub(channel)  # type: ignore[assignment]
        try:
            info = await stub.GetEngineInfo(
                engine_pb2.GetEngineInfoRequest(), timeout=self._settings.connect_timeout
            )
        except grpc.aio.AioRpcError as error:
            self.problem = ""
            raise _DisconnectedError(f"{error.code().name}: {error.details()}") from error
        source = self._settings.tokenizer or info.tokenizer
        try:
            tokenizer = await self._tokenizers.load(source)
        except TokenizerError as error:
            raise _UnusableError(str(error)) from error
        self.problem = ""
        call: Any = stub.Session()
        return Engine(
            *(call, self.address, info, tokenizer, stub),
            on_report=self._note,
            on_fault=self._fault,
            heartbeat_timeout=self._settings.heartbeat_timeout,
        )

    def _note(self, engine: Engine, response: engine_pb2.SessionResponse) -> None:
        """Apply an engine's report."""
        engine.prefixes.apply(response.prefixes)
        if response.HasField("adapters"):
            self.set_adapters(engine, response.adapters.adapters)
        if not response.HasField("load"):
            return
        drains = response.load.draining and not engine.load.draining
        engine.load = response.load
        if not engine.up:
            self._use(engine)
        elif drains:
            log.info("engine draining", engine=self.address)
            self._changed(engine.models)
        else:
            for model in engine.models:
                self._on_load(model)

    def set_adapters(self, engine: Engine, adapters: Iterable[engine_pb2.Adapter]) -> None:
        """Set an engine's adapters; requests that wait for a new one may be dispatched."""
        before = engine.adapters
        engine.adapters = {adapter.name: adapter for adapter in adapters}
        if engine.up and before != engine.adapters:
            self._changed({*before, *engine.adapters})

    def _changed(self, models: Iterable[str]) -> None:
        """Call `on_change` for each of an engine's models."""
        for model in models:
            self._on_change(model)

    def _fault(self, engine: Engine) -> None:
        """Prefer other engines for a while, because a step failed on this one."""
        self.breaker.fault()
        passed_over = round(self.breaker.remaining, 1)
        log.warning("a step failed on an engine", engine=self.address, passed_over=passed_over)
        self._change_when_closed(engine)

    def _change_when_closed(self, engine: Engine) -> None:
        """Call `on_change` when the breaker closes, to dispatch waiting requests."""
        loop = asyncio.get_running_loop()
        loop.call_later(self.breaker.remaining, self._changed, engine.models)

    def _use(self, engine: Engine) -> None:
        """Mark an engine as usable after its first message."""
        log.info(
            "engine up",
            engine=self.address,
            model=engine.info.model,
            device=engine.info.device,
            version=engine.info.version,
            blocks=engine.load.total_blocks,
            threads=engine.info.threads,
            cpus=engine.info.cpus,
            numa_nodes=list(engine.info.numa_nodes),
        )
        engine.up, engine.up_since = True, time.monotonic()
        self.breaker.connected()
        before, self.engine = self.engine, engine
        if before is not None:
            self._changed(set(before.models) - set(engine.models))
        self._changed(engine.models)
        if self.breaker.remaining:
            self._change_when_closed(engine)

    def _tell(self, state: RetryCallState) -> None:
        """Log once, not at every attempt, why there is no connection."""
        error = state.outcome.exception() if state.outcome else None
        if isinstance(error, _UnusableError):
            write = log.debug if self.problem == str(error) else log.error
            self.problem = str(error)
            write("engine cannot be used", engine=self.address, reason=self.problem)
            return
        write = log.warning if state.attempt_number == 1 else log.debug
        write("engine unreachable", engine=self.address, reason=str(error), retrying=True)


def _wait(state: RetryCallState) -> float:
    """Return the seconds until the next attempt to connect."""
    error = state.outcome.exception() if state.outcome else None
    return UNUSABLE_SECONDS if isinstance(error, _UnusableError) else BACKOFF(state)
