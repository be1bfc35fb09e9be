"""The servers of the workers' parent process: merged metrics and AdminService."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import grpc.aio
import structlog

from octavo.common import rpc
from octavo.common.background import end, first_to_end, keep_running
from octavo.common.metrics import serve_metrics
from octavo.router.admin_server import make_admin_server
from octavo.router.exposure import exposure
from octavo.router.settings import RouterSettings
from octavo.router.tenants.auth import Authenticator
from octavo.router.workers import wire
from octavo.router.workers.engine_status import merged_stats
from octavo.router.workers.members import Members
from octavo.router.workers.metric_sums import to_json
from octavo.router.workers.page import SCRAPE_SECONDS, Page
from octavo.router.workers.shared_admin import SharedAdminService
from octavo.router.workers.worker_slot import WorkerSlot

log = structlog.get_logger(__name__)


class ParentServer:
    """The parent process's servers, for operators and workers.

    Args:
        settings: The router's settings.
        socket: Path of the Unix socket for the workers.

    Raises:
        SettingsError: The tenants' file cannot be used.
    """

    def __init__(self, settings: RouterSettings, socket: Path) -> None:
        self._settings = settings
        self._socket = socket
        self._members = Members()
        self._page = Page(self._members)
        self._authenticator = Authenticator(
            settings.tenants,
            self._page.own,
            api_key=settings.api_key,
            workers=settings.workers,
        )
        self._service = SharedAdminService(self._members)
        self._private: grpc.aio.Server | None = None
        self._admin: grpc.aio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._open = ExitStack()  # closes the metrics server

    async def start(self) -> None:
        """Start listening.

        Raises:
            OSError: The port of the metrics or of AdminService is in use.
            TlsError: Certificates or keys cannot be used.
        """
        settings = self._settings
        methods: dict[str, wire.Method] = {"Metrics": self._metrics, "Status": self._status}
        self._private = await wire.make_server(self._socket, methods, {})
        if settings.admin_port:
            guard = self._authenticator.check_admin
            self._admin = await make_admin_server(settings, self._service, guard)
        self._open.enter_context(
            serve_metrics(
                self._page.registry,
                settings.host,
                settings.metrics_port,
                fallback="metrics_port" not in settings.model_fields_set,
            )
        )
        await self._private.start()
        if self._admin is not None:
            await self._admin.start()
        self._tasks.append(keep_running(self._authenticator.watch, "tenants"))

    def warn(self, address: str) -> None:
        """Warn about public ports without authentication or encryption."""
        for event, hint in exposure(self._settings):
            log.warning(event, address=address, hint=hint)

    async def join(self, slot: WorkerSlot) -> None:
        """Connect a worker, which listens at its socket, to the engines.

        Raises:
            grpc.aio.AioRpcError: The worker does not answer.
        """
        await self._service.join(slot)

    def serves(self) -> None:
        """Count a worker that listens for clients."""
        self._page.metrics.workers.inc()

    async def leave(self, number: int, *, served: bool) -> None:
        """Remove an ended worker, and keep its counts.

        Args:
            number: Number of the worker.
            served: Whether the worker was counted by `serves`.
        """
        await self._members.remove(number)
        self._page.end(number)
        if served:
            self._page.metrics.workers.dec()

    def restarts(self) -> None:
        """Count a restarted worker."""
        self._page.metrics.restarts.inc()

    async def ended(self) -> NoReturn:
        """Wait until a server stops unexpectedly.

        Raises:
            BackgroundError: The stopped server, by name.
        """
        servers = {"the workers' server": self._private, "AdminService": self._admin}
        await first_to_end(
            **{name: rpc.until_terminated(s) for name, s in servers.items() if s is not None}
        )

    async def stop(self) -> None:
        """End all servers."""
        for server in (self._admin, self._private):
            if server is not None:
                await server.stop(None)
        await end(*self._tasks)
        await asyncio.to_thread(self._open.close)
        for member in self._members:
            await self._members.remove(member.number)

    async def _metrics(self, *_: object) -> list[Any]:
        return to_json(await self._page.collect())

    async def _status(self, *_: object) -> dict[str, Any]:
        calls = [wire.call(m.channel, "Status", None, SCRAPE_SECONDS) for m in self._members]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return merged_stats([each for each in answers if not isinstance(each, BaseException)])
