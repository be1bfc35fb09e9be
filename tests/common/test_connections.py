"""Limits of a server's resources per connection, per address and in total."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import grpc.aio
import h2.config
import h2.connection
import h2.events
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from octavo.common import connections, rpc
from octavo.common.connections import ConnectionLimits
from octavo.v1 import generation_pb2, generation_pb2_grpc

NAME = "octavo.v1.GenerationService"
ENHANCE_YOUR_CALM = 11
WORD = generation_pb2.GenerateRequest(text="word")


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """Sends one word; ends the answer on demand."""

    def __init__(self):
        self.end = asyncio.Event()

    async def Generate(self, request, context):  # noqa: N802
        await context.write(generation_pb2.GenerateResponse())
        await self.end.wait()
        await context.write(generation_pb2.GenerateResponse())

    async def Tokenize(self, request, context):  # noqa: N802
        return generation_pb2.TokenizeResponse()


class Served:
    """A server's address, its service, and new connections to it."""

    def __init__(self, stack: AsyncExitStack, port: int, service: Generation):
        self._stack = stack
        self.port = port
        self.service = service

    async def stub(self):
        options = [("grpc.use_local_subchannel_pool", 1)]  # otherwise all share a connection
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options)
        await self._stack.enter_async_context(channel)
        return generation_pb2_grpc.GenerationServiceStub(channel)

    async def health(self):
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        await self._stack.enter_async_context(channel)
        return health_pb2_grpc.HealthStub(channel)


@asynccontextmanager
async def serving(max_calls_per_peer: int = 0, **limits):
    service = Generation()
    server, _ = await rpc.create_server(
        {NAME: lambda s: generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, s)},
        max_message_bytes=1 << 16,
        limits=ConnectionLimits(**limits),
        max_calls_per_peer=max_calls_per_peer,
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncExitStack() as stack:
        yield Served(stack, port, service)
    await server.stop(None)


async def failure(awaitable) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(awaitable, 20)
    return caught.value


async def begun(call) -> None:
    assert await asyncio.wait_for(call.read(), 20) is not grpc.aio.EOF


async def test_streams_of_a_connection():
    async with serving(max_streams=3) as served:
        stub = await served.stub()
        calls = [stub.Generate(WORD) for _ in range(4)]
        reads = [asyncio.create_task(call.read()) for call in calls]
        done, (held_back,) = await asyncio.wait(reads, timeout=1)
        assert len(done) == 3
        await begun((await served.stub()).Generate(WORD))  # on another connection
        for call, read in zip(calls, reads, strict=True):
            if read is not held_back:
                call.cancel()
        assert await asyncio.wait_for(held_back, 20) is not grpc.aio.EOF


async def test_connections_over_all_peers():
    async with serving(max_connections=2) as served:
        first, second, third = [await served.stub() for _ in range(3)]
        await begun(kept := first.Generate(WORD))
        await begun(second.Generate(WORD))
        error = await failure(third.Tokenize(generation_pb2.TokenizeRequest()))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        served.service.end.set()
        await begun(kept)


async def test_metadata():
    async with serving(max_metadata_bytes=4096) as served:
        stub = await served.stub()
        request = generation_pb2.TokenizeRequest()
        await stub.Tokenize(request, metadata=[("x", "y" * 3000)])
        error = await failure(stub.Tokenize(request, metadata=[("x", "y" * 5000)]))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        many = [(f"x-{i}", "y" * 50) for i in range(60)]
        error = await failure(stub.Tokenize(request, metadata=many))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.Tokenize(request)  # the connection still works


async def ping(port: int, *, times: int, seconds: float) -> int | None:
    """Ping at an interval; return the error of the server's GOAWAY, if any."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()

    async def send():
        for i in range(times):
            connection.ping(i.to_bytes(8, "big"))
            writer.write(connection.data_to_send())
            await asyncio.sleep(seconds)

    sending = asyncio.create_task(send())
    answered = 0
    try:
        while data := await asyncio.wait_for(reader.read(1 << 16), 20):
            for event in connection.receive_data(data):
                if isinstance(event, h2.events.ConnectionTerminated):
                    return event.error_code
                answered += isinstance(event, h2.events.PingAckReceived)
            if answered == times:
                return None
    finally:
        sending.cancel()
        writer.close()
    raise AssertionError("closed without a word")


async def test_pings():
    async with serving(min_ping_interval=0.2) as served:
        assert await ping(served.port, times=6, seconds=0.5) is None
        assert await ping(served.port, times=6, seconds=0.01) == ENHANCE_YOUR_CALM


async def test_a_connection_without_a_call_is_closed():
    async with serving(max_idle=0.3) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        events = []
        while data := await asyncio.wait_for(reader.read(1 << 16), 20):
            events += connection.receive_data(data)
            writer.write(connection.data_to_send())
        assert any(isinstance(event, h2.events.ConnectionTerminated) for event in events)
        writer.close()
        call = (await served.stub()).Generate(WORD)
        await begun(call)
        await asyncio.sleep(1)
        served.service.end.set()
        await begun(call)  # a connection with a call is not idle


async def test_calls_outlive_their_connection_for_the_grace():
    async with serving(max_age=0.3, age_grace=30) as served:
        stub = await served.stub()
        await begun(call := stub.Generate(WORD))
        await asyncio.sleep(1)  # the connection's age is past
        await stub.Tokenize(generation_pb2.TokenizeRequest())  # by another one
        served.service.end.set()
        await begun(call)


async def test_calls_end_with_the_grace():
    async with serving(max_age=0.3, age_grace=0.2) as served:
        await begun(call := (await served.stub()).Generate(WORD))
        assert (await failure(call.read())).code() is grpc.StatusCode.UNAVAILABLE


async def test_a_connection_that_says_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(connections, "HANDSHAKE_SECONDS", 0.5)
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        while await asyncio.wait_for(reader.read(1 << 16), 20):
            pass
        writer.close()


async def test_calls_of_an_address():
    async with serving(max_calls_per_peer=2) as served:
        first, second = await served.stub(), await served.stub()
        await begun(left := first.Generate(WORD))
        await begun(second.Generate(WORD))
        error = await failure(second.Tokenize(generation_pb2.TokenizeRequest()))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "ipv4:127.0.0.1 " in (error.details() or "")
        kinds = list(rpc_status.from_call(error).details)
        assert any(d.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for d in kinds)
        await (await served.health()).Check(health_pb2.HealthCheckRequest())
        left.cancel()
        async with asyncio.timeout(20):
            while True:
                try:
                    await first.Tokenize(generation_pb2.TokenizeRequest())
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.01)
                else:
                    break
