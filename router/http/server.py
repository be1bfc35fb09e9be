"""The door's listening socket: opened, served, closed with the router."""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import structlog
import uvicorn
from starlette.applications import Starlette

from octavo.common import background
from octavo.common.tls import Tls
from router.http.tls import server_context

log = structlog.get_logger(__name__)

BACKLOG = 1024
CLOSE_SECONDS = 1
"""What responses in progress have to end when the server stops."""


class HttpServer:
    """uvicorn in this event loop.

    Args:
        app: What it serves.
        tls: The port's files; None: plaintext.
        max_connections: Open ones; requests on more are answered 503.
        unread_seconds: What a client has to read what was sent; the kernel then
            resets its connection, which ends its request as leaving does.
    """

    def __init__(
        self, app: Starlette, *, tls: Tls | None, max_connections: int, unread_seconds: float
    ) -> None:
        self._tls = tls
        self._unread_seconds = unread_seconds
        self._config = uvicorn.Config(
            app,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=max_connections,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        self._server = _Server(self._config)
        self._task: asyncio.Task[None] | None = None

    def start(self, host: str, port: int) -> None:
        """Listens.

        Raises:
            OSError: The address is taken or not this machine's.
            TlsError: The files cannot be used.
        """
        self._config.load()
        if self._tls is not None:
            self._config.ssl = server_context(self._tls)
        listening = _listen(host, port)
        # Inherited by the connections; it counts windows that stay shut, too.
        listening.setsockopt(
            socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._unread_seconds * 1000)
        )
        self._task = background.start(self._server.serve([listening]), "http")
        log.info("http_listening", host=host, port=port)

    async def ended(self) -> None:
        """Wait until the server has stopped; raise what it failed with."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Closes the socket, then the connections, when what they carry has ended."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.gather(self._task, return_exceptions=True)  # `ended` tells its error


class _Server(uvicorn.Server):
    """A server whose process' signals are its owner's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Captures none."""
        yield


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(
            f"cannot serve HTTP on {host}:{port} ({error.strerror}); choose another --http-port, "
            "or 0 for none"
        ) from None
    listening.setblocking(False)
    return listening
