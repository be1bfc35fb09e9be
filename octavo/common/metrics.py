"""Prometheus metrics over HTTP, and those that every process has."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, start_http_server

log = structlog.get_logger(__name__)


def observe_process(registry: CollectorRegistry) -> None:
    """Adds the process' memory, CPU time and open files, and the running event loop's tasks."""
    ProcessCollector(registry=registry)
    loop = asyncio.get_running_loop()
    tasks = Gauge("octavo_tasks", "Tasks of the event loop that have not ended.", registry=registry)
    tasks.set_function(lambda: len(asyncio.all_tasks(loop)))


@contextmanager
def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> Iterator[None]:
    """Serves `registry` at http://host:port/metrics; port 0 serves nothing.

    Raises:
        OSError: the port is taken; the message names it and its flag.
    """
    if port == 0:
        yield
        return
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise OSError(
            f"cannot serve metrics on {host}:{port} ({error.strerror}); choose another "
            "--metrics-port, or 0 for none"
        ) from None
    log.info("metrics served", address=f"http://{host}:{port}/metrics")
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
