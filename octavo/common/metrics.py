"""Serves Prometheus metrics over HTTP, and adds metrics of the process."""

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from wsgiref.simple_server import WSGIRequestHandler, make_server

import structlog
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from octavo.common.background import keep_thread_running
from octavo.common.ports import metrics_listener

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.1
"""Seconds between the server's checks for shutdown."""


def observe_process(registry: CollectorRegistry) -> None:
    """Add metrics of the process's memory, CPU time, open files and event-loop tasks."""
    ProcessCollector(registry=registry)
    loop = asyncio.get_running_loop()
    tasks = Gauge("octavo_tasks", "Unfinished tasks of the event loop.", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


@contextmanager
def serve_metrics(
    registry: CollectorRegistry, host: str, port: int, *, fallback: bool = False
) -> Iterator[None]:
    """Serve `registry` at http://host:port/metrics; port 0 serves nothing.

    With `fallback`, use a free port if this one is in use.

    Raises:
        OSError: The port is in use; the message has the port and its flag.
    """
    if port == 0:
        yield
        return
    server = _listen(registry, host, port, fallback=fallback)
    address = f"http://{metrics_listener(host, server.server_port).address}/metrics"
    if server.server_port == port:
        log.info("metrics served", address=address)
    else:
        log.warning(
            "metrics served at another port: the default one is in use",
            taken=port,
            address=address,
            hint="choose one with --metrics-port",
        )
    thread = keep_thread_running(partial(server.serve_forever, POLL_SECONDS), "metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _listen(
    registry: CollectorRegistry, host: str, port: int, *, fallback: bool
) -> ThreadingWSGIServer:
    try:
        return _bind(registry, host, port)
    except OSError as error:
        if fallback and error.errno == errno.EADDRINUSE:
            return _bind(registry, host, 0)
        raise metrics_listener(host, port).error(error) from None


def _bind(registry: CollectorRegistry, host: str, port: int) -> ThreadingWSGIServer:
    host = metrics_listener(host, port).bare_host
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

    class Server(ThreadingWSGIServer):
        address_family = family

    return make_server(host, port, make_wsgi_app(registry), Server, _Handler)


class _Handler(WSGIRequestHandler):
    """A handler that logs no requests."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Log nothing."""
