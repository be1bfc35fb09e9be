"""The engine's process: gRPC server, core thread, metrics, signals."""

import asyncio
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import structlog

from octavo.common.background import OneThread, first_to_end, joined, shielded
from octavo.common.listening import is_loopback, listen
from octavo.common.metrics import observe_process, serve_metrics
from octavo.common.rpc import create_server, set_serving, until_terminated
from octavo.common.stopping import StoppedWhileStartingError
from octavo.common.tracing import Tracing
from octavo.engine.core import EngineCore
from octavo.engine.events import Event, Load, PrefixChange
from octavo.engine.heartbeat import watch
from octavo.engine.loading_service import EngineFront
from octavo.engine.metrics import EngineMetrics
from octavo.engine.session import Session, to_load
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import Parts, build
from octavo.engine.thread_bridge import Handover
from octavo.engine.tracing import RequestTracer
from octavo.engine.validation import to_request
from octavo.kernels import cpu
from octavo.v1 import engine_pb2, engine_pb2_grpc

log = structlog.get_logger(__name__)

SERVICE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
DRAIN_POLL_SECONDS = 0.05

Context = grpc.aio.ServicerContext[Any, Any]


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    """EngineService over one core."""

    def __init__(
        self, settings: EngineSettings, parts: Parts, metrics: EngineMetrics, tracing: Tracing
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._sessions: dict[int, Session] = {}
        self._ids = count()
        metrics.sessions.set_function(lambda: len(self._sessions))
        metrics.info.info(
            {
                "version": version("octavo"),
                "model": settings.model_name,
                "device": parts.device,
                "dtype": parts.dtype,
            }
        )
        loop = asyncio.get_running_loop()
        handover = Handover(loop, self._spread, self._distribute, self._fail_sessions)
        tracer = RequestTracer(tracing.tracer, settings.model_name)
        self.core = EngineCore(
            parts.scheduler,
            parts.executor,
            metrics,
            handover.deliver,
            max_waiting=settings.max_waiting,
            max_failed_steps=settings.max_failed_steps,
            ahead=settings.async_scheduling and parts.executor.asynchronous,
            publish=handover.publish,
            on_end=tracer.ended if tracing.on else None,
        )

    async def Session(  # noqa: N802 - the contract's name
        self, request_iterator: AsyncIterator[engine_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        """Carries one router's requests and tokens."""
        number = next(self._ids)
        translate = partial(
            to_request,
            session=number,
            limits=self._parts.limits,
            eos_token_ids=self._parts.eos_token_ids,
        )
        session = Session(self.core, translate)
        self._sessions[number] = session
        log.info("session opened", session=number, peer=context.peer())
        try:
            async for response in session.run(number, request_iterator):
                yield response
        finally:
            del self._sessions[number]
            log.info("session closed", session=number)

    async def GetEngineInfo(  # noqa: N802 - the contract's name
        self,
        request: engine_pb2.GetEngineInfoRequest,  # noqa: ARG002 - says nothing
        context: Context,  # noqa: ARG002
    ) -> engine_pb2.GetEngineInfoResponse:
        """Says what is served and how loaded it is."""
        parts, limits, settings = self._parts, self._parts.limits, self._settings
        return engine_pb2.GetEngineInfoResponse(
            model=settings.model_name,
            tokenizer=settings.model,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=parts.max_num_seqs,
            max_num_batched_tokens=parts.max_num_batched_tokens,
            max_outputs=limits.max_outputs,
            block_size=limits.block_size,
            block_bytes=parts.block_bytes,
            eos_token_ids=parts.eos_token_ids,
            features=engine_pb2.Features(
                prefix_caching=settings.enable_prefix_caching, beam_search=True
            ),
            version=version("octavo"),
            device=parts.device,
            dtype=parts.dtype,
            load=to_load(self.core.load),
            warnings=parts.warnings,
        )

    def close(self) -> None:
        """Ends all sessions; the core has stopped and told them so."""
        for session in self._sessions.values():
            session.close()

    def heartbeat(self, load: Load) -> None:
        """Tells all sessions the load while a step runs."""
        self._distribute([], load)

    def _fail_sessions(self) -> None:
        for session in self._sessions.values():
            session.fail()

    def _spread(self, change: PrefixChange) -> None:
        for number, session in self._sessions.items():
            if change.session in {None, number}:
                with _failing(session):
                    session.add_prefixes(change)

    def _distribute(self, events: list[Event], load: Load) -> None:
        by_session: defaultdict[int, list[Event]] = defaultdict(list)
        for event in events:
            by_session[event.session].append(event)
        shown = to_load(load)
        for number, session in self._sessions.items():
            with _failing(session):
                session.add(by_session[number], shown)


@contextmanager
def _failing(session: Session) -> Iterator[None]:
    """End a session that cannot take its events: others are not concerned."""
    try:
        yield
    except Exception:
        log.exception("events lost on their way to a session")
        session.fail()


async def serve(
    settings: EngineSettings,
    *,
    on_ready: Callable[[str], None] | None = None,
    socket: Path | None = None,
) -> None:
    """Serves a model until SIGTERM or SIGINT, then drains and stops.

    Args:
        settings: how.
        on_ready: called with the address once requests are accepted: HOST:PORT.
        socket: where to listen, in place of host and port; the address is then its.

    Raises:
        StartupError: the settings do not fit each other, the model or the
            machine.
        TlsError: certificate and key cannot be used.
        StoppedWhileStartingError: a signal came while the model was being loaded. The thread that
            loads it goes on: the caller ends the process.
        BackgroundError: a part that it cannot do without has ended.
        OSError: it cannot listen there, or cannot trace for want of a package.
    """
    tracing = Tracing(settings.otlp_endpoint, "octavo-engine")
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    metrics = EngineMetrics()
    observe_process(metrics.registry)
    front = EngineFront()
    server, health = await create_server(
        {SERVICE: partial(engine_pb2_grpc.add_EngineServiceServicer_to_server, front)},
        max_message_bytes=settings.max_message_bytes,
        limits=settings.connection_limits,
    )
    # One thread builds and computes: OpenMP keeps a pool for each thread that ever computed,
    # and where pools have more threads than there are cores, it has them sleep between loops.
    thread = OneThread("engine-core")
    try:
        # The ports come first: one that is taken is told before minutes go into the model.
        address = _listen(server, settings, socket)
        with serve_metrics(
            metrics.registry,
            settings.host,
            settings.metrics_port,
            fallback="metrics_port" not in settings.model_fields_set,
        ):
            await server.start()
            parts = await _unless_stopped(thread.call(_build, settings), stopping)
            front.engine = servicer = EngineServicer(settings, parts, metrics, tracing)
            beats = watch(
                servicer.core,
                servicer.heartbeat,
                device=parts.device,
                step_timeout=settings.step_timeout,
            )
            try:
                async with (
                    joined(beats, names=("heartbeat",), expected=(Exception,)) as (heartbeat,),
                    _running(servicer.core, thread) as core,
                ):
                    await set_serving(health, ["", SERVICE], serving=True)
                    log.info("engine ready", address=address, model=settings.model_name)
                    if on_ready is not None:
                        on_ready(address)
                    await _until_stopped(stopping, core, heartbeat, server)
                    await set_serving(health, ["", SERVICE], serving=False)
                    await _drain(servicer.core, settings.drain_timeout)
            finally:  # whatever ended it, sessions hear what the core said last
                servicer.close()
                await server.stop(grace=1.0)
    finally:
        await server.stop(grace=None)  # or its parts would outlive an error
        thread.close()
        await tracing.close()
    log.info("engine stopped")


def _build(settings: EngineSettings) -> Parts:
    """Load the model, and bind the thread that is going to compute to its cores."""
    parts = build(settings)
    if parts.device == "cpu":
        cpu.pin_threads()
    return parts


async def _unless_stopped(loading: asyncio.Future[Parts], stopping: asyncio.Event) -> Parts:
    """Wait for the model.

    Raises:
        StoppedWhileStartingError: A signal came first.
    """
    async with joined(stopping.wait()) as (stopped,):
        ends: set[asyncio.Future[Any]] = {loading, stopped}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("stopped while loading the model")
        raise StoppedWhileStartingError
    return loading.result()


@asynccontextmanager
async def _running(core: EngineCore, thread: OneThread) -> AsyncIterator[asyncio.Future[None]]:
    """Run the core within a block; at its end, stop the core and wait for it."""
    run = thread.call(core.run)
    try:
        yield run
    finally:
        core.stop()  # or its thread would outlive an error
        await asyncio.gather(run, return_exceptions=True)  # `_until_stopped` tells its error


def _listen(server: grpc.aio.Server, settings: EngineSettings, socket: Path | None) -> str:
    if socket is not None:
        address = f"unix:{socket}"
        server.add_insecure_port(address)
        return address
    address = listen(server, settings.host, settings.port, settings.tls)
    if not is_loopback(settings.host) and settings.tls_client_ca is None:
        hint = "say whose certificates it takes with --tls-client-ca"
        log.warning("anybody may use the engine", address=address, hint=hint)
    return address


async def _until_stopped(
    stopping: asyncio.Event,
    core: asyncio.Future[None],
    heartbeat: asyncio.Future[None],
    server: grpc.aio.Server,
) -> None:
    """Waits for a signal.

    Raises:
        BackgroundError: the core, its heartbeat or the server died, of its cause.
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


async def _drain(core: EngineCore, timeout: float) -> None:
    """Refuses new requests and waits until the running ones are done."""
    log.info("draining", running=core.load.running, timeout=timeout)
    core.drain()
    try:
        async with asyncio.timeout(timeout):
            # Until the core says that it drains, requests may wait to be taken in.
            while not (core.load.draining and core.idle):  # noqa: ASYNC110 - in another thread
                await asyncio.sleep(DRAIN_POLL_SECONDS)
    except TimeoutError:
        log.warning("drain timed out", running=core.load.running)
