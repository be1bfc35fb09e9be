"""One worker of a router: a complete router on shared ports, controlled by its parent."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc.aio

from octavo.common.shutdown import shutdown_signals
from octavo.router.admin import AdminService
from octavo.router.admin_server import ADMIN
from octavo.router.engines.changes import EngineChanges
from octavo.router.http.stats import LocalStats
from octavo.router.server import Router, drain, until_stopped
from octavo.router.settings import RouterSettings
from octavo.router.workers import wire
from octavo.router.workers.metric_sums import to_json
from octavo.router.workers.shared_stats import SharedStats
from octavo.router.workers.worker_slot import WorkerSlot
from octavo.v1 import admin_pb2_grpc

ENGINE_SECONDS = 5.0
"""Maximum seconds to wait for an engine before listening: without an engine, the worker would
refuse clients that other workers can serve."""


class Control:
    """Serves a worker's parent: connects to engines, returns stats, and runs AdminService.

    Args:
        router: The worker's router.
        slot: The worker's slot.
    """

    def __init__(self, router: Router, slot: WorkerSlot) -> None:
        self._router = router
        self._socket = slot.socket
        self._own = LocalStats(router.registry, router.pool, router.generator)
        self._server: grpc.aio.Server | None = None
        self.connected = asyncio.Event()

    async def start(self) -> None:
        """Listen."""
        admin = AdminService(self._router.pool)
        self._server = await wire.make_server(
            self._socket,
            {"Connect": self._connect, "Metrics": self._metrics, "Status": self._status},
            {ADMIN: partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin)},
        )
        await self._server.start()

    async def stop(self) -> None:
        """Stop at once."""
        if self._server is not None:
            await self._server.stop(None)

    async def _connect(self, changes: dict[str, Any], _: object) -> None:
        """Connect to the engines, with the parent's changes; called once."""
        self._router.connect(EngineChanges.from_json(changes))
        self.connected.set()

    async def _metrics(self, *_: object) -> list[Any]:
        return to_json(self._router.registry.collect())

    async def _status(self, *_: object) -> dict[str, Any]:
        return self._own.all()


async def serve(
    settings: RouterSettings,
    slot: WorkerSlot,
    *,
    on_reachable: Callable[[], None],
    on_ready: Callable[[str], None],
) -> None:
    """Run a worker until SIGTERM or SIGINT, then drain it; a second signal stops it at once.

    Args:
        settings: The worker's settings, from `settings_of_worker`.
        slot: The worker's slot.
        on_reachable: Called when the parent can call the worker.
        on_ready: Called with HOST:PORT when the worker listens for clients.

    Raises:
        BackgroundError: An essential part of the router stopped.
        OSError: An address is in use, or not local to this machine.
        SettingsError: The tenants' file cannot be used.
        TlsError: Certificates or keys cannot be used.
        TokenizerError: The tokenizer cannot be loaded.
    """
    with shutdown_signals() as signals:
        stats = SharedStats(slot.parent)
        router = Router(settings, stats=stats)
        control = Control(router, slot)

        async def start() -> None:
            if settings.tokenizer:
                await router.load_tokenizer(settings.tokenizer)
            await control.start()
            on_reachable()
            await control.connected.wait()
            await router.until_up(ENGINE_SECONDS)
            await router.listen()
            on_ready(router.address)
            await router.ended()

        try:
            await until_stopped(signals, start())
            await drain(router, signals)
        finally:
            await router.stop()
            await control.stop()
            await stats.close()
