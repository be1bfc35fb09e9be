"""A loaded engine that generates text: its core, and the sessions of routers and gateways."""

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import grpc
import structlog

from octavo.common.kv_cache.layer_group_messages import to_message
from octavo.common.tracing import Tracing
from octavo.engine.constraints.compiler import ConstraintCompiler
from octavo.engine.core import EngineCore
from octavo.engine.kv_transfer.grpc_peers import GrpcPeers
from octavo.engine.memory.cache_tensors import GIB
from octavo.engine.metrics import EngineMetrics
from octavo.engine.rpc.adapter_service import AdapterService
from octavo.engine.rpc.block_sender import BlockSender
from octavo.engine.rpc.engine_info import engine_info, show_info
from octavo.engine.rpc.session import Session
from octavo.engine.rpc.session_images import STORE_BYTES
from octavo.engine.rpc.sessions import Sessions
from octavo.engine.rpc.thread_bridge import thread_bridge
from octavo.engine.rpc.tracing import RequestTracer
from octavo.engine.rpc.validation import to_request
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
        sessions: The sessions of routers and gateways.
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
        self.sessions = Sessions()
        share = None if parts.leader is None else partial(self._run, parts.leader.load_adapter)
        self.adapters = AdapterService(parts.adapters, self.sessions.announce_adapters, share)
        metrics.sessions.set_function(lambda: self.sessions.of_routers)
        self.instance_id = uuid.uuid4().hex
        self._info = engine_info(settings, parts, self.instance_id)
        show_info(metrics, self._info)
        if parts.leader is not None:
            world = parts.leader.world
            metrics.show_rank_times(lambda: world.times)
        loop = asyncio.get_running_loop()
        self._tracer = RequestTracer(tracing.tracer, settings.model_name) if tracing.on else None
        self.core = EngineCore(
            parts.scheduler,
            parts.executor,
            metrics,
            thread_bridge(loop, self.sessions.add_events, self.sessions.fail),
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

    async def _run(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function in the core's thread, between steps; raise what it raises."""
        done: Future[None] = Future()

        def call() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    function(*arguments)
                    done.set_result(None)
                except Exception as error:  # noqa: BLE001 - for the caller
                    done.set_exception(error)

        self.core.call(call)
        await asyncio.wrap_future(done)

    def new_session(self) -> Session:
        """Create a session for a router; the caller attaches it."""
        translate = partial(
            to_request,
            limits=self.parts.limits,
            eos_token_ids=self.parts.eos_token_ids,
            find_adapter=self.adapters.find,
            vision=self.parts.vision,
        )
        return Session(self.core, translate)

    def info(self) -> engine_pb2.GetEngineInfoResponse:
        """Return the engine's description and load."""
        parts, limits, settings = self.parts, self.parts.limits, self.settings
        (budget,) = limits.budgets
        info = engine_pb2.GetEngineInfoResponse(
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            max_outputs=limits.max_outputs,
            block_size=budget.block_size,
            block_bytes=parts.block_bytes,
            eos_token_ids=parts.eos_token_ids,
            features=engine_pb2.Features(
                prefix_caching=settings.enable_prefix_caching,
                beam_search=limits.beam_search,
                constraints=limits.constraints,
                adapters=parts.adapters is not None,
                images=limits.images,
            ),
            load=self.core.load,
            default_sampling=parts.defaults.sampling,
            default_max_tokens=parts.defaults.max_tokens,
            layer_groups=map(to_message, budget.groups),
            adapters=self.adapters.message().adapters,
            block_layout=parts.block_layout,
            image_store_bytes=STORE_BYTES,
            role=engine_pb2.EngineRole.Value(f"ENGINE_ROLE_{settings.role.upper()}"),
        )
        info.MergeFrom(self._info)
        return info

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
