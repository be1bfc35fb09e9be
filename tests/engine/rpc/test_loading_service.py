"""An engine's answers while its model loads, and how it forwards calls afterwards."""

from functools import partial

import grpc
import pytest

from octavo.common.listening import listen
from octavo.common.rpc import create_server
from octavo.engine.rpc.loading_service import LoadingEngineService
from octavo.v1 import engine_pb2, engine_pb2_grpc

SERVICE = "octavo.v1.EngineService"


class Engine(engine_pb2_grpc.EngineServiceServicer):
    """Echoes requests."""

    def __init__(self):
        self.sessions = 0

    async def Session(self, request_iterator, context):  # noqa: N802
        self.sessions += 1
        try:
            async for request in request_iterator:
                started = engine_pb2.Started(request_id=request.submit.request_id)
                yield engine_pb2.SessionResponse(started=[started])
        finally:
            self.sessions -= 1

    async def GetEngineInfo(self, request, context):  # noqa: N802
        return engine_pb2.GetEngineInfoResponse(model="m")


async def test_calls_are_refused_until_there_is_an_engine():
    loading = LoadingEngineService()
    add = partial(engine_pb2_grpc.add_EngineServiceServicer_to_server, loading)
    server, _ = await create_server({SERVICE: add}, max_message_bytes=1 << 20)
    address = listen(server, "127.0.0.1", 0, None)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        asked = engine_pb2.SessionRequest(submit=engine_pb2.Submit(request_id="a"))
        for call in (
            stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest()),
            stub.Session(iter([asked])).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="is loading its model") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        loading.loaded = engine = Engine()
        info = await stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest())
        assert info.model == "m"
        session = stub.Session(iter([asked]))
        assert [started.request_id for started in (await session.read()).started] == ["a"]
        assert await session.read() is grpc.aio.EOF
        assert engine.sessions == 0
    await server.stop(None)
