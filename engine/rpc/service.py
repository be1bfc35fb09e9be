"""EngineService: an engine's RPCs for routers, over one core."""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import Any

import grpc
import structlog

from octavo.common.kv_cache.layer_group_messages import to_message
from octavo.common.topology import format_list
from octavo.common.tracing import Tracing
from octavo.engine.constraints.compiler import ConstraintCompiler
from octavo.engine.core import EngineCore
from octavo.engine.events import Event, Load, PrefixChange
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.metrics import EngineMetrics
from octavo.engine.rpc.adapter_service import AdapterService
from octavo.engine.rpc.event_sink import EventSink
from octavo.engine.rpc.session import Session, to_load
from octavo.engine.rpc.thread_bridge import thread_bridge
from octavo.engine.rpc.tracing import RequestTracer
from octavo.engine.rpc.validation import to_request
from octavo.engine.rpc.vllm.metrics import VllmMetrics
from octavo.engine.scheduling.sequence import SequenceGroup
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import Parts
from octavo.v1 import engine_pb2, engine_pb2_grpc

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Serves one core to any number of routers.

    Attributes:
        core: The core; it serves while its `run` runs in a thread.
    """

    def __init__(
        self, settings: EngineSettings, parts: Parts, metrics: EngineMetrics, tracing: Tracing
    ) -> None:
        self._settings = settings
        self._parts = parts
        self._adapters = AdapterService(parts.adapters, self._announce_adapters)
        self._sessions: dict[int, EventSink] = {}
        self._ids = count()
        metrics.sessions.set_function(
            lambda: sum(isinstance(sink, Session) for sink in self._sessions.values())
        )
        self._instance_id = uuid.uuid4().hex
        metrics.info.info(
            {
                "instance_id": self._instance_id,
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
            constraints=_compiler(settings, parts),
            disk=parts.disk,
        )
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

    async def Session(
        self, request_iterator: AsyncIterator[engine_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        """Serve one router's session."""
        number = next(self._ids)
        translate = partial(
            to_request,
            session=number,
            limits=self._parts.limits,
            eos_token_ids=self._parts.eos_token_ids,
            find_adapter=self._adapters.find,
        )
        session = Session(self.core, translate)
        self._sessions[number] = session
        if self._parts.adapters is not None:
            session.set_adapters(self._adapters.message())
        log.info("session opened", session=number, peer=context.peer())
        try:
            async for response in session.run(number, request_iterator):
                yield response
        finally:
            del self._sessions[number]
            log.info("session closed", session=number)

    async def GetEngineInfo(
        self, request: engine_pb2.GetEngineInfoRequest, context: Context
    ) -> engine_pb2.GetEngineInfoResponse:
        """Return the engine's description and load."""
        parts, limits, settings = self._parts, self._parts.limits, self._settings
        (budget,) = limits.budgets
        return engine_pb2.GetEngineInfoResponse(
            model=settings.model_name,
            instance_id=self._instance_id,
            tokenizer=settings.source,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=parts.max_num_seqs,
            max_num_batched_tokens=parts.max_num_batched_tokens,
            max_outputs=limits.max_outputs,
            block_size=budget.block_size,
            block_bytes=parts.block_bytes,
            eos_token_ids=parts.eos_token_ids,
            features=engine_pb2.Features(
                prefix_caching=settings.enable_prefix_caching,
                beam_search=limits.beam_search,
                constraints=limits.constraints,
                adapters=parts.adapters is not None,
            ),
            version=version("octavo"),
            device=parts.device,
            dtype=parts.dtype,
            kernels=parts.kernels,
            load=to_load(self.core.load),
            warnings=parts.warnings,
            default_sampling=parts.defaults.sampling,
            default_max_tokens=parts.defaults.max_tokens,
            threads=parts.threads.count,
            cpus=format_list(parts.threads.cpus),
            numa_nodes=parts.threads.nodes,
            layer_groups=map(to_message, budget.groups),
            ranks=parts.ranks,
            adapters=self._adapters.message().adapters,
            aliases=settings.model_names[1:],
        )

    async def LoadAdapter(
        self, request: engine_pb2.EngineServiceLoadAdapterRequest, context: Context
    ) -> engine_pb2.EngineServiceLoadAdapterResponse:
        """Load an adapter while requests run."""
        adapter = await self._adapters.load(request.name, request.path)
        return engine_pb2.EngineServiceLoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(
        self, request: engine_pb2.EngineServiceUnloadAdapterRequest, context: Context
    ) -> engine_pb2.EngineServiceUnloadAdapterResponse:
        """Unload an adapter; its running requests finish."""
        self._adapters.unload(request.name)
        return engine_pb2.EngineServiceUnloadAdapterResponse()

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
        """Pass events of a new session to `sink`; return the session's number."""
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

    def heartbeat(self, load: Load) -> None:
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

    def _add_events(self, events: list[Event | PrefixChange], load: Load) -> None:
        by_session: defaultdict[int, list[Event]] = defaultdict(list)
        for event in events:
            if isinstance(event, PrefixChange):
                self._add_prefixes(event)
            else:
                by_session[event.session].append(event)
        message = to_load(load)
        for number, session in self._sessions.items():
            with _isolated(session):
                session.add(by_session[number], message)


def _compiler(settings: EngineSettings, parts: Parts) -> ConstraintCompiler | None:
    """Return the compiler of constraints; None if the engine accepts none."""
    if parts.read_tokens is None:
        return None
    return ConstraintCompiler(
        parts.read_tokens,
        seconds=settings.constraint_timeout,
        cache_bytes=int(settings.constraint_cache * GIB),
    )


@contextmanager
def _isolated(session: EventSink) -> Iterator[None]:
    """End a session that cannot process its events; the others continue."""
    try:
        yield
    except Exception:
        log.exception("events lost on their way to a session")
        session.fail()
