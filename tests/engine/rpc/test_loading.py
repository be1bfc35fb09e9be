"""An engine's answers while its model loads; tests of the services cover those afterwards."""

from functools import partial

import grpc
import pytest

from octavo.common.listening import listen
from octavo.common.rpc import create_server
from octavo.engine.rpc.service import EngineService
from octavo.v1 import engine_pb2, engine_pb2_grpc


async def test_calls_are_refused_until_there_is_an_engine():
    add = partial(engine_pb2_grpc.add_EngineServiceServicer_to_server, EngineService())
    server, _ = await create_server({"octavo.v1.EngineService": add}, max_message_bytes=1 << 20)
    address = listen(server, "127.0.0.1", 0, None)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        for call in (
            stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest()),
            stub.Session(iter([engine_pb2.SessionRequest()])).read(),
            stub.LoadAdapter(engine_pb2.EngineServiceLoadAdapterRequest()),
            stub.UnloadAdapter(engine_pb2.EngineServiceUnloadAdapterRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="is loading its model") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)
