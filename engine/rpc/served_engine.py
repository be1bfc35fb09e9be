"""A loaded engine: its core, and the sessions of routers and gateways."""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import count
from typing import Any

import grpc
import structlog

from octavo.common.topology import format_list
from octavo.common.tracing import Tracing
from octavo.engine.constraints.compiler import ConstraintCompiler
from octavo.engine.core import EngineCore
from octavo.engine.events import Event, PrefixChange
from octavo.engine.kv_transfer.grpc_peers import GrpcPeers
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.metrics import EngineMetrics
from octavo.engine.rpc.adapter_service import AdapterService
from octavo.engine.rpc.block_sender import BlockSender
from octavo.engine.rpc.event_sink import EventSink
from octavo.engine.rpc.session import Session
from octavo.engine.rpc.thread_bridge import thread_bridge
from octavo.engine.rpc.tracing import RequestTracer
from octavo.engine.rpc.vllm.metrics import VllmMetrics
from octavo.engine.scheduling.sequence import SequenceGroup
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import Parts
from octavo.v1 import engine_pb2

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class ServedEngine:
    """One core, and the sessions that its events go to.

    Attributes:
        settings: The engine's settings.
        parts: The engine's parts.
        adapters: Loads and unloads adapters.
        instance_id: Id of this start of the engine.
        blocks: Sends blocks to other engines.
        core: The core; it serves while its `run` runs in a thread.
    """

    def __init__(
        self, settings: EngineSettings, parts: Parts, metrics: EngineMetrics, tracing: Tracing
    ) -> None:
        self.settings = settings
        self.parts = parts
        self.adapters = AdapterService(parts.adapters, self._announce_adapters)
        self._sessions: dict[int, EventSink] = {}
        self._ids = count()
        metrics.sessions.set_function(
            lambda: sum(isinstance(sink, Session) for sink in self._sessions.values())
        )
        self.instance_id = uuid.uuid4().hex
        metrics.info.info(
            {
                "instance_id": self.instance_id,
                "version": version("octavo"),
                "model": settings.model_name,
                "device": parts.device,
                "dtype": parts.dtype,
                "threads": str(parts.threads.count),
                "cpus": format_list(parts.threads.cpus),
                "numa_nodes": format_list(parts.threads.nodes),
                "kernels": parts.kernels,
            }
        )
        metrics.ranks.set(parts.ranks)
        if parts.leader is not None:
            metrics.show_rank_times(parts.leader.world.times)
        loop = asyncio.get_running_loop()
        self._tracer = RequestTracer(tracing.tracer, settings.model_name) if tracing.on else None
        self.core = EngineCore(
            parts.scheduler,
            parts.executor,
            metrics,
            thread_bridge(loop, self._add_events, self._fail_sessions),
            max_waiting=settings.max_waiting,
            max_failed_steps=settings.max_failed_steps,
            async_scheduling=settings.async_scheduling and parts.executor.asynchronous,
            on_end=self._request_ended,
            constraints=_compiler(settings, parts, metrics),
            disk=parts.disk,
            peers=GrpcPeers(parts.block_layout, parts.block_bytes, settings.peer_tls)
            if parts.block_layout
            else None,
        )
        self.blocks = BlockSender(self.core, parts.block_layout, parts.block_bytes)
        self._vllm_metrics: VllmMetrics | None = None
        if settings.metrics_names != "octavo":
            self._vllm_metrics = VllmMetrics(
                metrics,
                model=settings.model_name,
                limits=parts.limits,
                load=lambda: self.core.load,
                groups=self.core.requests.groups.values,
                adapters=parts.adapters or (),
            )
            metrics.exported.register(self._vllm_metrics)

    def _request_ended(self, group: SequenceGroup, outcome: str) -> None:
        """Log and trace the end of a request; called in the core's thread."""
        log.info(
            "request ended",
            request_id=group.request.request_id,
            outcome=outcome,
            output_tokens=sum(sequence.num_output for sequence in group.sequences),
        )
        if self._tracer is not None:
            self._tracer.ended(group, outcome)
        if self._vllm_metrics is not None:
            self._vllm_metrics.ended(group)

    def attach(self, sink: EventSink) -> int:
        """Start a session that gets events by `sink`; return its number."""
        number = next(self._ids)
        self._sessions[number] = sink
        return number

    def detach(self, number: int) -> None:
        """Pass a session no more events."""
        del self._sessions[number]

    def _announce_adapters(self, adapters: engine_pb2.Adapters) -> None:
        for session in self._sessions.values():
            session.set_adapters(adapters)

    def close(self) -> None:
        """End all sessions once they have sent the core's last events."""
        for session in self._sessions.values():
            session.close()

    def heartbeat(self, load: engine_pb2.Load) -> None:
        """Send the load to all sessions while a step runs."""
        self._add_events([], load)

    def _fail_sessions(self) -> None:
        for session in self._sessions.values():
            session.fail()

    def _add_prefixes(self, change: PrefixChange) -> None:
        for number, session in self._sessions.items():
            if change.session in {None, number}:
                with _isolated(session):
                    session.add_prefixes(change)

    def _add_events(self, events: list[Event | PrefixChange], load: engine_pb2.Load) -> None:
        by_session: defaultdict[int, list[Event]] = defaultdict(list)
        for event in events:
            if isinstance(event, PrefixChange):
                self._add_prefixes(event)
            else:
                by_session[event.session].append(event)
        for number, session in self._sessions.items():
            with _isolated(session):
                session.add(by_session[number], load)


def _compiler(
    settings: EngineSettings, parts: Parts, metrics: EngineMetrics
) -> ConstraintCompiler | None:
    """Return the compiler of constraints; None if the engine accepts none."""
    if parts.read_tokens is None:
        return None
    return ConstraintCompiler(
        parts.read_tokens,
        seconds=settings.constraint_timeout,
        cache_bytes=int(settings.constraint_cache * GIB),
        observe=metrics.constraint_seconds.observe,
    )


@contextmanager
def _isolated(session: EventSink) -> Iterator[None]:
    """End a session that cannot process its events; the others continue."""
    try:
        yield
    except Exception:
        log.exception("events lost on their way to a session")
        session.fail()
