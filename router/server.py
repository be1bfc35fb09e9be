"""The router process: creates the parts, and starts and stops them in order."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NoReturn

import grpc.aio
import structlog
from prometheus_client import CollectorRegistry

from octavo.common import rpc
from octavo.common.background import end, first_to_end, joined, keep_running
from octavo.common.descriptors import check_limit
from octavo.common.listening import listen, listen_on_socket
from octavo.common.metrics import observe_process, serve_metrics
from octavo.common.shutdown import ShutdownSignals, StoppedWhileStartingError, shutdown_signals
from octavo.common.tracing import Tracing
from octavo.router.admin import AdminService
from octavo.router.admin_server import make_admin_server
from octavo.router.admission import Admission, QueueLimits
from octavo.router.balancing import POLICIES
from octavo.router.engines.changes import EngineChanges
from octavo.router.engines.discovery import Discovery
from octavo.router.engines.engine import Engine
from octavo.router.engines.pool import EnginePool
from octavo.router.exposure import exposure
from octavo.router.generate import Generator
from octavo.router.http.http_frontend import HttpFrontend
from octavo.router.http.stats import LocalStats, RouterStats
from octavo.router.on_demand import OnDemandModels
from octavo.router.service import GenerationService
from octavo.router.settings import RouterSettings, is_discovered
from octavo.router.tenants.auth import Authenticator
from octavo.router.text.chat_template import ServerTemplate
from octavo.router.text.tokenization import Tokenizers
from octavo.v1 import generation_pb2, generation_pb2_grpc

log = structlog.get_logger(__name__)

SERVICE = "octavo.v1.GenerationService"
CLOSE_SECONDS = 1.0
"""Seconds for failed calls to send their status."""


class Router:
    """A router: its servers, engine connections and queue.

    Args:
        settings: The router's settings.
        on_serving: Called once with the model's card, when `engines` engines serve the model.
        engines: Number of engines to wait for before `on_serving`.
        stats: Stats of all workers, if the router is a worker. Default: this router's.
        on_demand: Models that are loaded when requests name them, if any.

    Raises:
        SettingsError: The tenants' file or the chat template's settings are unreadable or invalid.

    Attributes:
        address: HOST:PORT of the gRPC server, once started.
        registry: The router's metrics.
        authenticator: Finds tenants by API key or certificate.
        generator: Serves the requests.
        stats: Stats that its HTTP server shows.
    """

    def __init__(
        self,
        settings: RouterSettings,
        on_serving: Callable[[generation_pb2.ModelCard], None] | None = None,
        engines: int = 1,
        stats: RouterStats | None = None,
        on_demand: OnDemandModels | None = None,
    ) -> None:
        self.address = ""
        self._on_demand = on_demand
        self.registry = CollectorRegistry()
        self._settings = settings
        self._on_serving = on_serving
        self._engines = engines
        self.authenticator = Authenticator(
            settings.tenants,
            self.registry,
            api_key=settings.api_key,
            workers=settings.workers,
        )
        self._tokenizers = Tokenizers(
            allow_special_tokens=settings.allow_special_tokens,
            template=ServerTemplate.read(settings.chat_template, settings.chat_template_kwargs),
        )
        self._tracing = Tracing(settings.otlp_endpoint, "octavo-router")
        self.pool = EnginePool(
            settings,
            self._tokenizers,
            self._engines_changed,
            self._load_reported,
            offered=dict if on_demand is None else on_demand.offered,
        )
        self.admission: Admission[Engine] = Admission(
            self.pool.candidates,
            POLICIES[settings.balancing](),
            QueueLimits(
                settings.max_queue_size, settings.max_queue_tokens, settings.max_queue_time
            ),
            outage_seconds=settings.migration_timeout,
        )
        self.generator = Generator(
            settings,
            self.pool,
            self.admission,
            self._tokenizers,
            self.registry,
            tracing=self._tracing,
            on_demand=on_demand,
        )
        self.stats = stats or LocalStats(self.registry, self.pool, self.generator)
        self._server: grpc.aio.Server | None = None
        self._health: rpc.HealthServicer | None = None
        self._stopping = False
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._admin: grpc.aio.Server | None = None
        self._http: HttpFrontend | None = None
        self._open = ExitStack()  # closes the metrics server

    async def start(self) -> None:
        """Start listening, and start to connect to the engines.

        Raises:
            OSError: An address is in use, or not local to this machine.
            TlsError: Certificates or keys cannot be used.
        """
        await self.listen()
        self.connect()

    async def listen(self) -> None:
        """Start listening.

        Raises:
            OSError: An address is in use, or not local to this machine.
            TlsError: Certificates or keys cannot be used.
        """
        settings = self._settings
        service = GenerationService(self.generator)
        add = partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, service)
        self._server, self._health = await rpc.create_server(
            {SERVICE: add},
            max_message_bytes=settings.max_message_bytes,
            limits=settings.connection_limits,
            max_calls_per_peer=settings.max_calls_per_peer,
            guard=self.authenticator.check,
            reuse_port=settings.shares_ports,
        )
        if settings.uds is not None:
            self.address = listen_on_socket(self._server, settings.uds)
        else:
            self.address = listen(
                *(self._server, settings.host, settings.port, settings.tls),
                shared=settings.shares_ports,
            )
        if settings.engine_tls is not None:
            settings.engine_tls.read()
        if settings.admin_port:
            admin = AdminService(self.pool, self._on_demand)
            guard = self.authenticator.check_admin
            self._admin = await make_admin_server(settings, admin, guard)
        observe_process(self.registry)
        check_limit(settings.max_connections * (2 if settings.serves_http else 1))
        self._open.enter_context(
            serve_metrics(
                self.registry,
                settings.host,
                settings.metrics_port,
                fallback="metrics_port" not in settings.model_fields_set,
            )
        )
        if settings.serves_http:
            self._http = HttpFrontend(
                settings,
                self.generator,
                authenticator=self.authenticator,
                pool=self.pool,
                is_serving=lambda: self._serving,
                stats=self.stats,
            )
            self._http.start()
        await self._server.start()
        if self._admin is not None:
            await self._admin.start()
        self._tasks += [
            keep_running(self._watch, "health"),
            keep_running(self.authenticator.watch, "tenants"),
        ]
        log.info("router listening", address=self.address, engines=settings.engine)
        if not settings.shares_ports:  # else the parent warns, once
            for event, hint in exposure(settings):
                log.warning(event, address=self.address, hint=hint)

    def connect(self, changes: EngineChanges | None = None) -> None:
        """Start to connect to the engines.

        Args:
            changes: Changes that AdminService made to the engines before this router started.
        """
        settings, changes = self._settings, changes or EngineChanges()
        for address in changes.known(settings.engine):
            self.pool.add(address)
            if address in changes.drained:
                self.pool.drain(address)
        names = [target for target in settings.engine if is_discovered(target)]
        discovery = Discovery(names, self.pool, settings.dns_interval, changes=changes)
        self._tasks.append(keep_running(discovery.run, "discovery"))

    async def until_up(self, seconds: float) -> None:
        """Wait until an engine is available, for at most `seconds`; call it before `listen`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self.pool.up():
                    self._changed.clear()
                    await self._changed.wait()

    async def load_tokenizer(self, source: str) -> None:
        """Load a tokenizer before an engine asks for it.

        Raises:
            TokenizerError: The tokenizer cannot be loaded.
        """
        await self._tokenizers.load(source)

    async def ended(self) -> NoReturn:
        """Wait until an essential part of the router stops.

        Raises:
            BackgroundError: The part that stopped, by name.
        """
        servers = {"the server": self._server, "AdminService": self._admin}
        works = {name: rpc.until_terminated(s) for name, s in servers.items() if s is not None}
        if self._http is not None:
            works["HTTP"] = self._http.ended()
        await first_to_end(**works)

    async def drain(self) -> None:
        """Keep serving for --drain-delay, then refuse new calls and finish those in progress.

        During the delay, clients move to other routers: health checks fail, and HTTP responses
        close their connections. After it, no connection is accepted, and gRPC sends a graceful
        GOAWAY. Clients have until --drain-timeout to read finished responses.
        """
        assert self._server is not None
        assert self._health is not None
        settings, loop = self._settings, asyncio.get_running_loop()
        self._stopping = True
        self._changed.set()
        if self._http is not None:
            self._http.close_connections()
        await asyncio.sleep(settings.drain_delay)
        end_time = loop.time() + settings.drain_timeout + CLOSE_SECONDS
        if self._http is not None:
            await self._http.refuse()
        closing = self._server.stop(settings.drain_timeout + CLOSE_SECONDS)
        async with joined(closing, names=("grpc-closing",)) as tasks:
            await self.generator.drain(settings.drain_timeout)
            if self._http is not None:
                await self._http.stop(end_time - loop.time())
            self._health.end_watches()
            await asyncio.wait(tasks)

    async def stop(self) -> None:
        """Stop everything at once."""
        self._stopping = True
        self.generator.fail_all("the router shut down before the request was complete; retry it")
        if self._http is not None:
            await self._http.stop()
        for server in (self._server, self._admin):
            if server is not None:
                await server.stop(CLOSE_SECONDS)
        await end(*self._tasks)
        await self.pool.close()
        await self.generator.close()
        self._tokenizers.close()
        await asyncio.to_thread(self._open.close)
        await self._tracing.close()
        log.info("router stopped", address=self.address)

    @property
    def _serving(self) -> bool:
        """Whether the router has an engine, or can start one, and is not stopping."""
        return bool(self.pool.up() or self.pool.offered) and not self._stopping

    def _engines_changed(self, model: str) -> None:
        """Handle an engine of `model` that came up, went down, or began to drain."""
        self.generator.metrics.engines_up.labels(model).set(len(self.pool.up(model)))
        self.admission.dispatch(model)
        self._changed.set()
        if self._on_serving is not None and len(self.pool.up(model)) >= self._engines:
            tell, self._on_serving = self._on_serving, None
            tell(self.pool.card(model, queued=0))

    def _load_reported(self, model: str) -> None:
        """Dispatch requests when an engine of `model` has reported its load."""
        self.admission.dispatch(model)

    async def _watch(self) -> None:
        """Keep the health service up to date."""
        assert self._health is not None
        while True:
            self._changed.clear()
            await rpc.set_serving(self._health, ["", SERVICE], serving=self._serving)
            await self._changed.wait()


async def serve(
    settings: RouterSettings,
    *,
    on_made: Callable[[Router], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
    on_serving: Callable[[generation_pb2.ModelCard], None] | None = None,
    engines_ready: asyncio.Future[Any] | None = None,
    tokenizer: str | None = None,
    on_demand: OnDemandModels | None = None,
) -> None:
    """Run a router until SIGTERM or SIGINT, then drain it; a second signal stops it at once.

    Args:
        settings: The router's settings.
        on_made: Called with the router before it starts.
        on_ready: Called with HOST:PORT when the router listens.
        on_serving: Called once with the model's card, when all engines of the settings serve it.
        engines_ready: Future to wait for, while listening, before connecting to engines. Its error
            ends the router.
        tokenizer: Tokenizer to load at the start. Default: the settings' tokenizer, if any.
        on_demand: Models that are loaded when requests name them, if any.

    Raises:
        BackgroundError: An essential part of the router stopped.
        OSError: An address is in use, or not local to this machine.
        SettingsError: The tenants' file cannot be used.
        TlsError: Certificates or keys cannot be used.
        TokenizerError: The tokenizer cannot be loaded.
        StoppedWhileStartingError: A signal arrived before `engines_ready`.
    """
    with shutdown_signals() as signals:
        router = Router(settings, on_serving, len(settings.engine), on_demand=on_demand)
        if on_made is not None:
            on_made(router)
        try:
            await router.listen()
            await until_stopped(
                signals,
                router.ended(),
                _start(router, settings, on_ready, engines_ready, tokenizer),
            )
            if engines_ready is not None and not engines_ready.done():
                raise StoppedWhileStartingError(signals.came[0])
            await drain(router, signals)
        finally:
            await router.stop()


async def until_stopped(signals: ShutdownSignals, *works: Coroutine[Any, Any, None]) -> None:
    """Run `works`, which run forever, until the first signal arrives.

    Raises:
        Exception: The error of a failed work.
    """
    async with joined(signals.first.wait(), *works, names=("signal", "parts", "start")) as tasks:
        await _first(tasks)


async def drain(router: Router, signals: ShutdownSignals) -> None:
    """Drain a router, until the second signal arrives."""
    log.info("router draining", requests=router.generator.in_flight)
    async with joined(signals.second.wait(), router.drain(), names=("hurry", "drain")) as tasks:
        await _first(tasks)


async def _start(
    router: Router,
    settings: RouterSettings,
    on_ready: Callable[[str], None] | None,
    engines_ready: asyncio.Future[Any] | None,
    tokenizer: str | None,
) -> None:
    """Complete the start, then wait for cancellation."""
    if source := tokenizer or settings.tokenizer:
        await router.load_tokenizer(source)
    if on_ready is not None:
        on_ready(router.address)
    if engines_ready is not None:
        await engines_ready
    router.connect()
    await asyncio.Event().wait()


async def _first(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait until one task ends; raise its error if it failed."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
