"""The router's process: its parts put together, started, and stopped in order."""

import asyncio
import signal
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn

import grpc.aio
import structlog
from grpc_health.v1 import health
from prometheus_client import CollectorRegistry

from octavo.common import rpc
from octavo.common.background import end, first_to_end, joined, keep_running
from octavo.common.listening import is_loopback, listen
from octavo.common.metrics import observe_process, serve_metrics
from octavo.common.peer_limit import limit_calls
from octavo.common.stopping import StoppedWhileStartingError
from octavo.common.tracing import Tracing
from octavo.router.admin import AdminService
from octavo.router.admission import Admission, QueueLimits
from octavo.router.balancing import POLICIES
from octavo.router.engines.discovery import Discovery
from octavo.router.engines.link import Engine
from octavo.router.engines.pool import EnginePool
from octavo.router.generate import Generator
from octavo.router.http.http_frontend import HttpFrontend
from octavo.router.service import GenerationService
from octavo.router.settings import DNS_SCHEME, RouterSettings
from octavo.router.tenants.auth import Authenticator
from octavo.router.text.tokenization import Tokenizers
from octavo.v1 import admin_pb2_grpc, generation_pb2, generation_pb2_grpc

log = structlog.get_logger(__name__)

SERVICE = "octavo.v1.GenerationService"
ADMIN = "octavo.v1.AdminService"
CLOSE_SECONDS = 1.0
"""Seconds that failed calls have to send their status."""


class Router:
    """A router that can be started and stopped.

    Args:
        settings: Its settings.
        on_serving: Called once, with the model that `engines` engines have.
        engines: See `on_serving`.

    Raises:
        SettingsError: The tenants' file cannot be read, or is wrong.

    Attributes:
        address: HOST:PORT that it listens on, once started.
        registry: Its metrics.
        authenticator: Tells its tenants by their keys and certificates.
        generator: Serves its requests.
    """

    def __init__(
        self,
        settings: RouterSettings,
        on_serving: Callable[[generation_pb2.ModelCard], None] | None = None,
        engines: int = 1,
    ) -> None:
        self.address = ""
        self.registry = CollectorRegistry()
        self._settings = settings
        self._on_serving = on_serving
        self._engines = engines
        self.authenticator = Authenticator(settings.tenants, self.registry)
        self._tokenizers = Tokenizers()
        self._tracing = Tracing(settings.otlp_endpoint, "octavo-router")
        self.pool = EnginePool(
            settings,
            self._tokenizers,
            self._engines_changed,
            self._load_reported,
        )
        self.admission: Admission[Engine] = Admission(
            self.pool.candidates,
            POLICIES[settings.balancing](),
            QueueLimits(
                settings.max_queue_size, settings.max_queue_tokens, settings.max_queue_time
            ),
            outage_seconds=settings.failover_timeout,
        )
        self.generator = Generator(
            settings,
            self.pool,
            self.admission,
            self._tokenizers,
            self.registry,
            tracing=self._tracing,
        )
        self._server: grpc.aio.Server | None = None
        self._health: health.aio.HealthServicer | None = None
        self._stopping = False
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._admin: grpc.aio.Server | None = None
        self._http: HttpFrontend | None = None
        self._open = ExitStack()  # what is left to close: the metrics' server

    async def start(self) -> None:
        """Listen, and begin to connect to the engines.

        Raises:
            OSError: The address or the metrics port is taken or not this machine's.
            TlsError: Certificates or keys cannot be used.
        """
        await self.listen()
        self.connect()

    async def listen(self) -> None:
        """Listen.

        Raises:
            OSError: As `start`.
            TlsError: Likewise.
        """
        settings = self._settings
        service = GenerationService(self.generator)
        add = partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, service)
        self._server, self._health = await rpc.create_server(
            {SERVICE: add},
            max_message_bytes=settings.max_message_bytes,
            limits=settings.connection_limits,
            interceptors=limit_calls(settings.max_calls_per_peer),
            guard=self.authenticator.check,
        )
        self.address = listen(self._server, settings.host, settings.port, settings.tls)
        if settings.engine_tls is not None:
            settings.engine_tls.read()
        if settings.admin_port:
            self._admin = await self._make_admin()
        observe_process(self.registry)
        self._open.enter_context(
            serve_metrics(
                self.registry,
                settings.host,
                settings.metrics_port,
                fallback="metrics_port" not in settings.model_fields_set,
            )
        )
        if settings.http_port:
            self._http = HttpFrontend(
                settings,
                self.generator,
                authenticator=self.authenticator,
                pool=self.pool,
                is_serving=lambda: self._serving,
                registry=self.registry,
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
        self._warn()

    def connect(self) -> None:
        """Begin to connect to the engines."""
        settings = self._settings
        for address in settings.engine:
            if not address.startswith(DNS_SCHEME):
                self.pool.add(address)
        names = [target for target in settings.engine if target.startswith(DNS_SCHEME)]
        discovery = Discovery(names, self.pool, settings.dns_interval)
        self._tasks.append(keep_running(discovery.run, "discovery"))

    async def load_tokenizer(self, source: str) -> None:
        """Load a tokenizer before an engine names it.

        Raises:
            TokenizerError: It cannot be loaded.
        """
        await self._tokenizers.load(source)

    async def ended(self) -> NoReturn:
        """Wait until a part that the router cannot do without has stopped.

        Raises:
            BackgroundError: It names the part.
        """
        servers = {"the server": self._server, "AdminService": self._admin}
        works = {name: rpc.until_terminated(s) for name, s in servers.items() if s is not None}
        if self._http is not None:
            works["HTTP"] = self._http.ended()
        await first_to_end(**works)

    async def drain(self) -> None:
        """Refuse new calls and let those in progress finish, for a while."""
        self._stopping = True
        self._changed.set()
        await self.generator.drain(self._settings.drain_timeout)

    async def stop(self) -> None:
        """End everything, at once."""
        self._stopping = True
        self.generator.fail_all("the router shut down before the request was complete; retry it")
        if self._http is not None:
            await self._http.stop()
        for server in (self._server, self._admin):
            if server is not None:
                await server.stop(CLOSE_SECONDS)
        await end(*self._tasks)
        await self.pool.close()
        self._tokenizers.close()
        await asyncio.to_thread(self._open.close)
        await self._tracing.close()
        log.info("router stopped", address=self.address)

    def _warn(self) -> None:
        """Warn of missing authentication or encryption beyond this machine."""
        settings = self._settings
        hosts = [settings.host, *([settings.http_host] if settings.http_port else [])]
        if all(map(is_loopback, hosts)):
            return
        if self.authenticator.open and settings.tls_client_ca is None:
            hint = "set --tenants or --tls-client-ca"
            log.warning("the router is unauthenticated", address=self.address, hint=hint)
        elif settings.tls is None:
            hint = "set --tls-cert and --tls-key, unless a proxy in front of the router does TLS"
            log.warning("API keys are sent unencrypted", address=self.address, hint=hint)

    @property
    def _serving(self) -> bool:
        """Whether the router has an engine and is not stopping."""
        return bool(self.pool.up()) and not self._stopping

    def _engines_changed(self, model: str) -> None:
        """Note that an engine of `model` came, went, or began to drain."""
        self.generator.metrics.engines_up.labels(model).set(len(self.pool.up(model)))
        self.admission.dispatch(model)
        self._changed.set()
        if self._on_serving is not None and len(self.pool.up(model)) >= self._engines:
            tell, self._on_serving = self._on_serving, None
            tell(self.pool.card(model, queued=0))

    def _load_reported(self, model: str) -> None:
        """Dispatch requests: an engine of `model` has reported its load."""
        self.admission.dispatch(model)

    async def _make_admin(self) -> grpc.aio.Server:
        """Make the server of AdminService; not yet started.

        Raises:
            OSError: The address is taken or not this machine's.
        """
        settings = self._settings
        service = AdminService(self.pool)
        server, health = await rpc.create_server(
            {
                ADMIN: lambda server: admin_pb2_grpc.add_AdminServiceServicer_to_server(
                    service, server
                )
            },
            max_message_bytes=settings.max_message_bytes,
            limits=settings.connection_limits,
            guard=self.authenticator.check_admin,
        )
        listen(server, settings.admin_host, settings.admin_port, settings.tls, flag="--admin-port")
        await rpc.set_serving(health, ["", ADMIN], serving=True)
        return server

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
    on_ready: Callable[[str], None] | None = None,
    on_serving: Callable[[generation_pb2.ModelCard], None] | None = None,
    engines_ready: asyncio.Future[Any] | None = None,
    tokenizer: str | None = None,
) -> None:
    """Run a router until SIGTERM or SIGINT, then drain it; a second signal ends it at once.

    Args:
        settings: Its settings.
        on_ready: Called with HOST:PORT when it listens.
        on_serving: Called, once, with the model that all of the settings' engines have.
        engines_ready: Waited for before it connects to the engines, while it listens already; its
            error ends the router.
        tokenizer: Loaded at the start. Default: that of the settings, if any.

    Raises:
        BackgroundError: A part that it cannot do without has stopped.
        OSError: It cannot listen there.
        SettingsError: The tenants' file cannot be used.
        TlsError: Certificates or keys cannot be used.
        TokenizerError: The tokenizer cannot be loaded.
        StoppedWhileStartingError: A signal came before `engines_ready`.
    """
    loop = asyncio.get_running_loop()
    signals = [asyncio.Event(), asyncio.Event()]

    stopped_by: list[signal.Signals] = []

    def on_signal(number: signal.Signals) -> None:
        stopped_by.append(number)
        next((s for s in signals if not s.is_set()), signals[-1]).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    router = Router(settings, on_serving, len(settings.engine))
    try:
        await router.listen()
        parts = (
            signals[0].wait(),
            router.ended(),
            _start(router, settings, on_ready, engines_ready, tokenizer),
        )
        async with joined(*parts, names=("signal", "parts", "start")) as tasks:
            await _first(tasks)
        if engines_ready is not None and not engines_ready.done():
            raise StoppedWhileStartingError(stopped_by[0])
        log.info("router draining", requests=router.generator.in_flight)
        async with joined(signals[1].wait(), router.drain(), names=("hurry", "drain")) as tasks:
            await _first(tasks)
    finally:
        await router.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _start(
    router: Router,
    settings: RouterSettings,
    on_ready: Callable[[str], None] | None,
    engines_ready: asyncio.Future[Any] | None,
    tokenizer: str | None,
) -> None:
    """Do the rest of a start, then wait to be cancelled."""
    if source := tokenizer or settings.tokenizer:
        await router.load_tokenizer(source)
    if on_ready is not None:
        on_ready(router.address)
    if engines_ready is not None:
        await engines_ready
    router.connect()
    await asyncio.Event().wait()


async def _first(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Wait for the first end; raise the error of a task that has failed."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()
