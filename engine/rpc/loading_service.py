"""EngineService while the model loads and afterwards."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from octavo.common import rpc
from octavo.v1 import engine_pb2, engine_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

RETRY_SECONDS = 1.0


class LoadingEngineService(engine_pb2_grpc.EngineServiceServicer):
    """Answers UNAVAILABLE until the model is loaded; then forwards calls.

    Attributes:
        loaded: The service that answers calls; None while the model loads.
    """

    def __init__(self) -> None:
        self.loaded: engine_pb2_grpc.EngineServiceServicer | None = None

    async def Session(
        self, request_iterator: AsyncIterator[engine_pb2.SessionRequest], context: Context
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        """Serve one router's session."""
        session: Any = self._service().Session(request_iterator, context)  # type: ignore[arg-type]
        async with aclosing(session) as responses:
            async for response in responses:
                yield response

    async def GetEngineInfo(
        self, request: engine_pb2.GetEngineInfoRequest, context: Context
    ) -> engine_pb2.GetEngineInfoResponse:
        """Return the engine's description and load."""
        answer: Any = self._service().GetEngineInfo(request, context)  # type: ignore[arg-type]
        info: engine_pb2.GetEngineInfoResponse = await answer
        return info

    async def LoadAdapter(
        self, request: engine_pb2.EngineServiceLoadAdapterRequest, context: Context
    ) -> engine_pb2.EngineServiceLoadAdapterResponse:
        """Load an adapter."""
        answer: Any = self._service().LoadAdapter(request, context)  # type: ignore[arg-type]
        response: engine_pb2.EngineServiceLoadAdapterResponse = await answer
        return response

    async def UnloadAdapter(
        self, request: engine_pb2.EngineServiceUnloadAdapterRequest, context: Context
    ) -> engine_pb2.EngineServiceUnloadAdapterResponse:
        """Unload an adapter."""
        answer: Any = self._service().UnloadAdapter(request, context)  # type: ignore[arg-type]
        response: engine_pb2.EngineServiceUnloadAdapterResponse = await answer
        return response

    def _service(self) -> engine_pb2_grpc.EngineServiceServicer:
        """Return the loaded service.

        Raises:
            rpc.RpcError: UNAVAILABLE while the model loads.
        """
        if self.loaded is None:
            raise rpc.unavailable("the engine is loading its model; try again", RETRY_SECONDS)
        return self.loaded
