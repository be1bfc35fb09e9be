"""EngineService: the RPCs of an engine for routers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import structlog

from octavo.common import rpc
from octavo.engine.rpc.block_sender import SHARES_NONE
from octavo.engine.rpc.served_embedder import ServedEmbedder
from octavo.engine.rpc.served_engine import ServedEngine
from octavo.engine.rpc.validation import to_prefetch
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
        self.loaded: ServedEngine | ServedEmbedder | None = None

    def _engine(self) -> ServedEngine | ServedEmbedder:
        """Return the loaded engine.

        Raises:
            rpc.RpcError: UNAVAILABLE while the model loads.
        """
        if self.loaded is None:
            raise rpc.unavailable("the engine is loading its model; try again", RETRY_SECONDS)
        return self.loaded

    def _generating(self) -> ServedEngine:
        """Return the loaded engine, which generates text.

        Raises:
            rpc.RpcError: UNAVAILABLE while the model loads, FAILED_PRECONDITION if it
                embeds or classifies texts.
        """
        engine = self._engine()
        if isinstance(engine, ServedEmbedder):
            raise rpc.precondition(
                "model", "the engine generates no text: it has no adapters or blocks"
            )
        return engine

    async def Session(
        self, request_iterator: AsyncIterator[engine_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        """Serve one router's session."""
        engine = self._engine()
        session = engine.new_session()
        number = engine.sessions.attach(session)
        if isinstance(engine, ServedEngine) and engine.parts.adapters is not None:
            session.set_adapters(engine.adapters.message())
        log.info("session opened", session=number, peer=context.peer())
        try:
            async for response in session.run(number, request_iterator):
                yield response
        finally:
            engine.sessions.detach(number)
            log.info("session closed", session=number)

    async def Embed(
        self, request: engine_pb2.EngineServiceEmbedRequest, context: Context
    ) -> engine_pb2.EngineServiceEmbedResponse:
        """Embed or classify texts."""
        engine = self._engine()
        if isinstance(engine, ServedEngine):
            raise rpc.precondition(
                "lengths", "the engine generates text, and neither embeds nor classifies it"
            )
        return await engine.embed(request)

    async def GetEngineInfo(
        self, request: engine_pb2.GetEngineInfoRequest, context: Context
    ) -> engine_pb2.GetEngineInfoResponse:
        """Return the engine's description and load."""
        return self._engine().info()

    async def LoadAdapter(
        self, request: engine_pb2.EngineServiceLoadAdapterRequest, context: Context
    ) -> engine_pb2.EngineServiceLoadAdapterResponse:
        """Load an adapter while requests run."""
        adapter = await self._generating().adapters.load(request.name, request.path)
        return engine_pb2.EngineServiceLoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(
        self, request: engine_pb2.EngineServiceUnloadAdapterRequest, context: Context
    ) -> engine_pb2.EngineServiceUnloadAdapterResponse:
        """Unload an adapter; its running requests finish."""
        self._generating().adapters.unload(request.name)
        return engine_pb2.EngineServiceUnloadAdapterResponse()

    async def ReadBlocks(
        self, request: engine_pb2.ReadBlocksRequest, context: Context
    ) -> AsyncIterator[engine_pb2.ReadBlocksResponse]:
        """Send blocks to another engine."""
        async with aclosing(self._generating().blocks.send(request)) as pieces:
            async for piece in pieces:
                yield piece

    async def PrefetchBlocks(
        self, request: engine_pb2.PrefetchBlocksRequest, context: Context
    ) -> engine_pb2.PrefetchBlocksResponse:
        """Copy blocks that another engine is computing."""
        engine = self._generating()
        limits, find_adapter = engine.parts.limits, engine.adapters.find
        prefetch = to_prefetch(request, limits=limits, find_adapter=find_adapter)
        read_ahead = engine.core.read_ahead
        if read_ahead is None or not engine.parts.block_layout:
            raise rpc.precondition("kv_source", SHARES_NONE)
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        prefetch.then = partial(loop.call_soon_threadsafe, ended.set)
        engine.core.call(read_ahead.prefetch, prefetch)
        try:
            await ended.wait()
        finally:
            engine.core.call(read_ahead.cancel_prefetch, prefetch)
        return engine_pb2.PrefetchBlocksResponse()
