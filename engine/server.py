"""The engine's process: gRPC server, core thread, metrics, signals."""

import asyncio
import gc
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import structlog

from octavo.common.background import OneThread, first_to_end, joined, shielded
from octavo.common.listening import listen, listen_on_socket
from octavo.common.metrics import observe_process, serve_metrics
from octavo.common.proxies import is_loopback
from octavo.common.rpc import create_server, set_serving, until_terminated
from octavo.common.shutdown import StoppedWhileStartingError
from octavo.common.topology import format_list
from octavo.common.tracing import Tracing
from octavo.engine.metrics import EngineMetrics
from octavo.engine.parallel.place import RankError, RankPlace
from octavo.engine.parallel.processes import RankProcesses, started_ranks
from octavo.engine.rpc.heartbeat import Core, watch
from octavo.engine.rpc.served_embedder import ServedEmbedder
from octavo.engine.rpc.served_engine import ServedEngine
from octavo.engine.rpc.service_registry import ServiceRegistry
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import Parts, build
from octavo.engine.startup.build_embedder import EmbedderParts, build_embedder
from octavo.engine.startup.capacity import StartupError
from octavo.kernels import cpu

log = structlog.get_logger(__name__)

DRAIN_POLL_SECONDS = 0.05
MOVE_SECONDS = 10.0
"""Maximum time in which other engines copy the blocks of requests that a drain left."""
QUIET_SECONDS = 1.0
"""Time without a copy after which none is expected."""

AnyParts = Parts | EmbedderParts


async def serve(
    settings: EngineSettings,
    *,
    on_ready: Callable[[str], None] | None = None,
    socket: Path | None = None,
) -> None:
    """Serve a model until SIGTERM or SIGINT, then drain and stop.

    Args:
        settings: The model and the settings to serve it with.
        on_ready: Called with the address, HOST:PORT, once requests are accepted.
        socket: Unix socket to listen on instead of host and port; its path is then the address.

    Raises:
        StartupError: The settings conflict with each other, the model or the machine.
        TlsError: The certificate and key cannot be used.
        StoppedWhileStartingError: A signal came while the model was being loaded. The loading
            thread continues, so the caller must end the process.
        BackgroundError: A required background part has ended.
        OSError: The engine cannot listen on the address, or a package for tracing is missing.
    """
    tracing = Tracing(settings.otlp_endpoint, "octavo-engine")
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    stopped_by: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        stopped_by.append(number)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    metrics = EngineMetrics(settings.metrics_names)
    observe_process(metrics.exported)
    services = ServiceRegistry(settings, metrics)
    server, health = await create_server(
        services.by_name,
        max_message_bytes=settings.max_message_bytes,
        limits=settings.connection_limits,
    )
    # One thread builds and computes: OpenMP keeps a thread pool for each thread that ever computed,
    # and pools with more threads than cores sleep between loops.
    thread = OneThread("engine-core")
    try:
        # The ports come first, so that a port in use is reported before the model takes minutes.
        address = _listen(server, settings, socket)
        with (
            serve_metrics(
                metrics.exported,
                settings.host,
                settings.metrics_port,
                fallback="metrics_port" not in settings.model_fields_set,
            ),
            _started_ranks(settings) as (place, ranks),
        ):
            await server.start()
            gc.freeze()  # imports' objects, most of all: the collection after the build skips them
            building = thread.call(_build, settings, place)
            parts = await _unless_stopped(building, stopping, stopped_by)
            if ranks is not None:
                ranks.ready()
            engine = _serving(settings, parts, metrics, tracing)
            served = services.start(engine)
            _exclude_from_collection()
            beats = watch(
                engine.core,
                engine.sessions.heartbeat,
                device=parts.device,
                step_timeout=settings.step_timeout,
            )
            try:
                async with (
                    joined(beats, names=("heartbeat",), expected=(Exception,)) as (heartbeat,),
                    _running(engine.core, thread) as core,
                ):
                    await set_serving(health, ["", *served], serving=True)
                    log.info(
                        "engine ready",
                        address=address,
                        model=settings.model_name,
                        services=served,
                    )
                    if on_ready is not None:
                        on_ready(address)
                    await _until_stopped(stopping, core, heartbeat, server)
                    await set_serving(health, ["", *served], serving=False)
                    await _drain_and_move(engine, settings.drain_timeout)
                if parts.leader is not None:
                    if ranks is not None:
                        ranks.begin_to_stop()
                    await thread.call(parts.leader.stop)
            finally:  # sessions always send the core's last events
                engine.sessions.close()
                await server.stop(grace=1.0)
    finally:
        await server.stop(grace=None)  # otherwise it would outlive an error
        thread.close()
        await tracing.close()
    log.info("engine stopped")


@contextmanager
def _started_ranks(
    settings: EngineSettings,
) -> Iterator[tuple[RankPlace | None, RankProcesses | None]]:
    """Start the other ranks for a block; see `started_ranks`.

    Raises:
        StartupError: A launcher's variables do not fit the setting.
    """
    settings_json = settings.model_dump_json(exclude_unset=True)
    try:
        with started_ranks(settings.ranks, settings_json, settings.machines) as ranks:
            yield ranks
    except RankError as error:
        raise StartupError(str(error)) from error


def _build(settings: EngineSettings, place: RankPlace | None) -> AnyParts:
    """Load the model, and pin the compute threads to their cores."""
    parts = build_embedder(settings) or build(settings, place)
    if parts.leader is not None:
        parts.leader.watch()
    places = parts.threads.places
    if parts.device == "cpu" and cpu.pin_threads(places):
        log.info("threads pinned", cpus=[format_list(place) for place in places])
    return parts


def _serving(
    settings: EngineSettings, parts: AnyParts, metrics: EngineMetrics, tracing: Tracing
) -> ServedEngine | ServedEmbedder:
    if isinstance(parts, EmbedderParts):
        return ServedEmbedder(settings, parts, metrics)
    return ServedEngine(settings, parts, metrics, tracing)


def _exclude_from_collection() -> None:
    """Exclude existing objects from garbage collection.

    Scanning all objects of torch and transformers takes as long as many steps.
    """
    gc.collect()
    gc.freeze()


async def _unless_stopped(
    loading: asyncio.Future[AnyParts],
    stopping: asyncio.Event,
    stopped_by: list[signal.Signals],
) -> AnyParts:
    """Wait for the model.

    Raises:
        StoppedWhileStartingError: A signal came first.
    """
    async with joined(stopping.wait()) as (stopped,):
        ends: set[asyncio.Future[Any]] = {loading, stopped}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("stopped while loading the model")
        raise StoppedWhileStartingError(stopped_by[0])
    return loading.result()


@asynccontextmanager
async def _running(core: Core, thread: OneThread) -> AsyncIterator[asyncio.Future[None]]:
    """Run the core within a block; at its end, stop the core and wait for it."""
    run = thread.call(core.run)
    try:
        yield run
    finally:
        core.stop()  # otherwise its thread would outlive an error
        await asyncio.gather(run, return_exceptions=True)  # `_until_stopped` raises its error


def _listen(server: grpc.aio.Server, settings: EngineSettings, socket: Path | None) -> str:
    if socket is not None:
        return listen_on_socket(server, socket)
    address = listen(server, settings.host, settings.port, settings.tls)
    if not is_loopback(settings.host) and settings.tls_client_ca is None:
        hint = "set --tls-client-ca"
        log.warning("engine port is unauthenticated", address=address, hint=hint)
    return address


async def _until_stopped(
    stopping: asyncio.Event,
    core: asyncio.Future[None],
    heartbeat: asyncio.Future[None],
    server: grpc.aio.Server,
) -> None:
    """Wait for a signal.

    Raises:
        BackgroundError: The core, its heartbeat or the server ended; the cause says why.
    """
    parts = first_to_end(
        **{
            "the engine's core": shielded(core),
            "the engine's heartbeat": shielded(heartbeat),
            "gRPC": until_terminated(server),
        }
    )
    async with joined(stopping.wait(), parts, names=("signal", "parts")) as tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def _drain_and_move(engine: ServedEngine | ServedEmbedder, timeout: float) -> None:
    """Drain; fail the requests that are left, and wait while other engines copy their blocks."""
    await _drain(engine.core, timeout)
    if engine.core.idle or isinstance(engine, ServedEmbedder):
        return
    engine.core.fail_all()
    quiet_since = began = time.monotonic()
    while (now := time.monotonic()) < min(began + MOVE_SECONDS, quiet_since + QUIET_SECONDS):
        if engine.blocks.reading:
            quiet_since = now
        await asyncio.sleep(DRAIN_POLL_SECONDS)


async def _drain(core: Core, timeout: float) -> None:
    """Refuse new requests and wait until the running ones are done."""
    log.info("draining", running=core.load.running, timeout=timeout)
    core.drain()
    try:
        async with asyncio.timeout(timeout):
            # Requests may wait in the queue of calls until the load shows draining.
            while not (core.load.draining and core.idle):  # noqa: ASYNC110 - in another thread
                await asyncio.sleep(DRAIN_POLL_SECONDS)
    except TimeoutError:
        log.warning("drain timed out", running=core.load.running)
