"""The HTTP listening socket: opened, served and closed with the router."""

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Generator
from functools import partial
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from octavo.common import background
from octavo.common.descriptors import Reserve, none_left
from octavo.common.tls import server_context
from octavo.router.http import connection, unix_socket
from octavo.router.http.connection import CROWDED, Connection, Shared
from octavo.router.http.connection_limits import AnonymousPace, OpenConnections
from octavo.router.settings import RouterSettings, http_listener

log = structlog.get_logger(__name__)

BACKLOG = 1024
CLOSE_SECONDS = 1
"""Seconds for responses in progress to end when the server stops."""
CLOSE = (b"connection", b"close")
RESERVED = 16
"""Reserved file descriptors, so that health checks are answered when no others are left."""
RETRY_SECONDS = 0.1
"""Seconds until the next accept after one failed, for example without free descriptors."""


class HttpServer:
    """uvicorn, run in this event loop.

    Args:
        app: The application.
        settings: Limits, TLS files and timeouts. After --write-timeout without the client reading,
            the kernel resets the connection, which cancels its request like a disconnect.
    """

    def __init__(self, app: ASGIApp, settings: RouterSettings) -> None:
        self._settings = settings
        self._config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=settings.max_connections + 1,  # `OpenConnections` closes the excess
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        self._server = _Server(self._config)
        self._shared = Shared(
            OpenConnections(settings.max_connections, settings.max_connections_per_peer),
            AnonymousPace(),
            settings.max_metadata_bytes,
            settings.max_message_bytes,
        )
        self._tls: ssl.SSLContext | None = None
        self._file_number = 0
        self._opening: set[asyncio.Task[None]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start listening.

        Raises:
            OSError: The address is in use, or not local to this machine.
            TlsError: The TLS files cannot be used.
        """
        settings = self._settings
        self._config.load()
        if settings.tls is not None:
            self._tls = server_context(settings.tls)
        if settings.http_uds is not None:
            listening = unix_socket.listen(settings.http_uds, BACKLOG)
            self._file_number = settings.http_uds.stat().st_ino
        else:
            port = http_listener(settings.http_host, settings.http_port)
            listening = port.listen(BACKLOG, shared=settings.shares_ports)
            # Accepted connections inherit it; it also closes those whose client stops reading.
            listening.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.write_timeout * 1000)
            )
        listening.setblocking(False)
        self._tasks = [
            background.start(self._accept(listening), "http-accept"),
            background.start(self._server.serve(), "http"),
        ]
        log.info("HTTP listening", url=settings.http_url)

    async def ended(self) -> None:
        """Wait until the server stops; raise the error that stopped it."""
        if self._tasks:
            accepting, serving = self._tasks
            await background.first_to_end(
                accepting=background.shielded(accepting),
                serving=background.shielded(serving),
            )

    def close_connections(self) -> None:
        """Send `Connection: close` with each later response."""
        self._config.encoded_headers.append(CLOSE)  # uvicorn copies these every second
        self._server.server_state.default_headers.append(CLOSE)

    async def stop_accepting(self) -> None:
        """Accept the connections that wait in the backlog, then close the socket."""
        await background.end(*self._tasks[:1])

    async def stop(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close the socket, then the connections once their responses have been read.

        Args:
            seconds: Maximum wait for the responses.
        """
        if not self._tasks:
            return
        await self.stop_accepting()
        await background.end(*self._opening)
        _, serving = self._tasks
        self._config.timeout_graceful_shutdown = math.ceil(seconds)
        self._server.should_exit = True
        await asyncio.gather(serving, return_exceptions=True)  # `ended` raises its error

    async def _accept(self, listening: socket.socket) -> None:
        """Accept one connection per turn of the loop; uvicorn would accept the whole backlog."""
        loop = asyncio.get_running_loop()
        reserve = Reserve(RESERVED)
        with listening, contextlib.closing(reserve):
            try:
                while True:
                    reserve.fill()
                    try:
                        self._take(*await loop.sock_accept(listening))
                    except OSError as error:
                        if not (none_left(error) and reserve.release()):
                            log.warning("HTTP connection not accepted", reason=str(error))
                        elif self._take_crowded(listening):
                            continue
                        await asyncio.sleep(RETRY_SECONDS)
            finally:
                if self._settings.http_uds is not None:
                    unix_socket.remove(self._settings.http_uds, self._file_number)
                with contextlib.suppress(OSError):  # BlockingIOError: backlog is empty
                    while True:
                        self._take(*listening.accept())

    def _take_crowded(self, listening: socket.socket) -> bool:
        """Accept a connection with a reserved descriptor; return whether one waited."""
        with contextlib.suppress(BlockingIOError):  # EMFILE does not say whether one waits
            self._take(*listening.accept(), crowded=True)
            return True
        return False

    def _take(
        self,
        accepted: socket.socket,
        address: Any,  # noqa: ANN401 - by family
        *,
        crowded: bool = False,
    ) -> None:
        """Open a connection, if the limits allow it.

        Args:
            accepted: The connection's socket.
            address: The client's address.
            crowded: Whether the connection uses a reserved descriptor.
        """
        accepted.setblocking(False)
        peer = address[0] if address else f"unix-{accepted.fileno()}"  # each is its own peer
        made = self._server.connection(self._shared, peer, crowded=crowded)
        if not self._shared.connections.enter(made):
            accepted.close()
            return
        made.opening = background.report_failure(partial(self._open, made, accepted), "http-open")
        self._opening.add(made.opening)
        made.opening.add_done_callback(self._opening.discard)

    async def _open(self, made: Connection, accepted: socket.socket) -> None:
        """Connect the protocol to its socket, after the TLS handshake."""
        seconds = None if self._tls is None else connection.HEADER_SECONDS
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: made, accepted, ssl=self._tls, ssl_handshake_timeout=seconds
            )
        except OSError:
            pass  # closed by the peer, or TLS failed or timed out
        finally:
            if not made.is_open:
                self._shared.connections.leave(made)


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals and the listening socket to its owner."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Do not listen: `HttpServer` does."""
        self.servers: list[asyncio.Server] = []
        self.started = True

    def connection(self, shared: Shared, address: str, *, crowded: bool) -> Connection:
        """Return a protocol for a connection."""
        return Connection(
            shared,
            address,
            config=self.config,
            server_state=self.server_state,
            app_state={CROWDED: crowded},
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Capture no signals."""
        yield
