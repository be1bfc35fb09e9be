"""EngineService: the RPCs of an engine for routers."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from importlib.metadata import version
from typing import Any

import grpc
import structlog

from octavo.common import rpc
from octavo.common.kv_cache.layer_group_messages import to_message
from octavo.common.topology import format_list
from octavo.engine.rpc.served_engine import ServedEngine
from octavo.engine.rpc.session import Session
from octavo.engine.rpc.validation import to_request
from octavo.v1 import engine_pb2, engine_pb2_grpc

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

RETRY_SECONDS = 1.0


class EngineService(engine_pb2_grpc.EngineServiceServicer):
    """Serves an engine to any number of routers; answers UNAVAILABLE until it is loaded.

    Attributes:
        loaded: The engine; None while its model loads.
    """

    def __init__(self) -> None:
        self.loaded: ServedEngine | None = None

    def _engine(self) -> ServedEngine:
        """Return the loaded engine.

        Raises:
            rpc.RpcError: UNAVAILABLE while the model loads.
        """
        if self.loaded is None:
            raise rpc.unavailable("the engine is loading its model; try again", RETRY_SECONDS)
        return self.loaded

    async def Session(
        self, request_iterator: AsyncIterator[engine_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        """Serve one router's session."""
        engine = self._engine()
        translate = partial(
            to_request,
            limits=engine.parts.limits,
            eos_token_ids=engine.parts.eos_token_ids,
            find_adapter=engine.adapters.find,
        )
        session = Session(engine.core, translate)
        number = engine.attach(session)
        if engine.parts.adapters is not None:
            session.set_adapters(engine.adapters.message())
        log.info("session opened", session=number, peer=context.peer())
        try:
            async for response in session.run(number, request_iterator):
                yield response
        finally:
            engine.detach(number)
            log.info("session closed", session=number)

    async def GetEngineInfo(
        self, request: engine_pb2.GetEngineInfoRequest, context: Context
    ) -> engine_pb2.GetEngineInfoResponse:
        """Return the engine's description and load."""
        engine = self._engine()
        parts, limits, settings = engine.parts, engine.parts.limits, engine.settings
        (budget,) = limits.budgets
        return engine_pb2.GetEngineInfoResponse(
            model=settings.model_name,
            instance_id=engine.instance_id,
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
            load=engine.core.load,
            warnings=parts.warnings,
            default_sampling=parts.defaults.sampling,
            default_max_tokens=parts.defaults.max_tokens,
            threads=parts.threads.count,
            cpus=format_list(parts.threads.cpus),
            numa_nodes=parts.threads.nodes,
            layer_groups=map(to_message, budget.groups),
            ranks=parts.ranks,
            adapters=engine.adapters.message().adapters,
            aliases=settings.model_names[1:],
            block_layout=parts.block_layout,
        )

    async def LoadAdapter(
        self, request: engine_pb2.EngineServiceLoadAdapterRequest, context: Context
    ) -> engine_pb2.EngineServiceLoadAdapterResponse:
        """Load an adapter while requests run."""
        adapter = await self._engine().adapters.load(request.name, request.path)
        return engine_pb2.EngineServiceLoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(
        self, request: engine_pb2.EngineServiceUnloadAdapterRequest, context: Context
    ) -> engine_pb2.EngineServiceUnloadAdapterResponse:
        """Unload an adapter; its running requests finish."""
        self._engine().adapters.unload(request.name)
        return engine_pb2.EngineServiceUnloadAdapterResponse()

    async def ReadBlocks(
        self, request: engine_pb2.ReadBlocksRequest, context: Context
    ) -> AsyncIterator[engine_pb2.ReadBlocksResponse]:
        """Send blocks to another engine."""
        async with aclosing(self._engine().blocks.send(request)) as pieces:
            async for piece in pieces:
                yield piece
