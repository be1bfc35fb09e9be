import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import h2.config
import h2.connection
import pytest
import uvloop
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from octavo.common import rpc
from octavo.common.rpc import server as server_module
from octavo.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
)

GENERATION = "octavo.v1.GenerationService"
ENGINE = "octavo.v1.EngineService"
BAD_UTF8 = b"\xff\xfe"


class Generation(generation_pb2_grpc.GenerationServiceServicer):
    """Fails in the way that the request's text names."""

    async def Generate(self, request, context):  # noqa: N802
        await context.write(generation_pb2.GenerateResponse())
        if request.text == "crash":
            raise RuntimeError("secret")
        if request.text == "abort":
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "mine")
        raise rpc.exhausted("too much", 1.5)

    async def Tokenize(self, request, context):  # noqa: N802
        if request.text == "crash":
            raise RuntimeError("secret")
        raise rpc.invalid("text", "text must be shorter")

    async def ListModels(self, request, context):  # noqa: N802
        return generation_pb2.ListModelsResponse()


class Engine(engine_pb2_grpc.EngineServiceServicer):
    async def Session(self, request_iterator, context):  # noqa: N802
        async for request in request_iterator:
            if request.submit.request_id == "crash":
                raise RuntimeError("secret")
            if request.submit.request_id == "refuse":
                raise rpc.unavailable("draining")
            yield engine_pb2.SessionResponse()


@asynccontextmanager
async def serving(**options) -> AsyncIterator[tuple[grpc.aio.Channel, object]]:
    server, health = await rpc.create_server(
        {
            GENERATION: lambda s: generation_pb2_grpc.add_GenerationServiceServicer_to_server(
                Generation(), s
            ),
            ENGINE: lambda s: engine_pb2_grpc.add_EngineServiceServicer_to_server(Engine(), s),
        },
        max_message_bytes=1 << 16,
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = rpc.channel_options(keepalive_time=10, keepalive_timeout=10)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel, health
    await server.stop(None)


async def failure(call) -> grpc.aio.AioRpcError:
    async def drain():
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await drain()
    return caught.value


def details(error: grpc.aio.AioRpcError, kind):
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        if packed.Is(kind.DESCRIPTOR):
            message = kind()
            packed.Unpack(message)
            return message
    return None


def raw(channel, kind: str, method: str):
    """Return a call whose requests are raw bytes."""
    return getattr(channel, kind)(method)


async def test_unary_error_carries_its_field():
    async with serving() as (channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        error = await failure(stub.Tokenize(generation_pb2.TokenizeRequest(text="x")))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "text must be shorter"
    (violation,) = details(error, error_details_pb2.BadRequest).field_violations
    assert (violation.field, violation.description) == ("text", "text must be shorter")


async def test_stream_error_carries_retry_info():
    async with serving() as (channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        error = await failure(stub.Generate(generation_pb2.GenerateRequest(text="x")))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    delay = details(error, error_details_pb2.RetryInfo).retry_delay
    assert delay.ToTimedelta().total_seconds() == 1.5


@pytest.mark.parametrize("method", ["Generate", "Tokenize"])
async def test_unexpected_exception_does_not_leak(method):
    async with serving() as (channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        message = getattr(generation_pb2, f"{method}Request")(text="crash")
        error = await failure(getattr(stub, method)(message))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in error.details()


async def test_handler_may_abort_itself():
    async with serving() as (channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        error = await failure(stub.Generate(generation_pb2.GenerateRequest(text="abort")))
    assert (error.code(), error.details()) == (grpc.StatusCode.ALREADY_EXISTS, "mine")


@pytest.mark.parametrize(
    ("name", "code"),
    [("crash", grpc.StatusCode.INTERNAL), ("refuse", grpc.StatusCode.UNAVAILABLE)],
)
async def test_bidi_errors(name, code):
    async with serving() as (channel, _):
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        call = stub.Session()
        await call.write(engine_pb2.SessionRequest())
        await call.read()
        await call.write(engine_pb2.SessionRequest(submit=engine_pb2.Submit(request_id=name)))
        error = await failure(call)
    assert error.code() is code
    assert "secret" not in error.details()


async def test_a_string_that_is_not_utf8_is_invalid():
    good = generation_pb2.GenerateRequest(
        chat=generation_pb2.ChatPrompt(
            messages=[
                generation_pb2.ChatMessage(role="user", content="ok"),
                generation_pb2.ChatMessage(role="user", content="QQ"),
            ]
        )
    )
    data = good.SerializeToString().replace(b"QQ", BAD_UTF8)
    async with serving() as (channel, _):
        call = raw(channel, "unary_stream", f"/{GENERATION}/Generate")
        error = await failure(call(data))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a valid protobuf GenerateRequest" in error.details()
    assert "not UTF-8" in error.details()


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x7f", b"\x07"])
async def test_garbage_is_invalid(data):
    async with serving() as (channel, _):
        call = raw(channel, "unary_unary", f"/{GENERATION}/Tokenize")
        error = await failure(call(data))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "TokenizeRequest" in error.details()


async def test_garbage_in_the_middle_of_a_bidi_stream():
    good = engine_pb2.SessionRequest(submit=engine_pb2.Submit(request_id="QQ"))
    async with serving() as (channel, _):
        call = raw(channel, "stream_stream", f"/{ENGINE}/Session")()
        await call.write(good.SerializeToString())
        await call.read()
        await call.write(good.SerializeToString().replace(b"QQ", BAD_UTF8))
        error = await failure(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a valid protobuf SessionRequest" in error.details()


async def test_message_over_the_limit():
    async with serving() as (channel, _):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        error = await failure(stub.Tokenize(generation_pb2.TokenizeRequest(text="x" * 70_000)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class Abandoned(generation_pb2_grpc.GenerationServiceServicer):
    """Blocks its event loop until the client has left, then answers."""

    def __init__(self):
        self.called = threading.Event()
        self.left = threading.Event()
        self.ends: list[BaseException] = []

    async def _answer(self, answer):
        self.called.set()
        assert self.left.wait(20)
        try:
            await answer
        except BaseException as error:
            self.ends.append(error)
            raise

    async def Generate(self, request, context):  # noqa: N802
        await self._answer(rpc.write(context, generation_pb2.GenerateResponse()))

    async def Tokenize(self, request, context):  # noqa: N802
        await self._answer(rpc.abort(context, rpc.invalid("text", "text must be shorter")))

    async def Detokenize(self, request, context):  # noqa: N802
        self.called.set()
        assert self.left.wait(20)
        raise rpc.invalid("text", "text must be shorter")


@pytest.mark.parametrize("method", ["Generate", "Tokenize", "Detokenize"])
async def test_a_client_that_leaves_before_it_is_answered_is_no_error(method, caplog):
    service = Abandoned()
    server, _ = await rpc.create_server(
        {
            GENERATION: lambda s: generation_pb2_grpc.add_GenerationServiceServicer_to_server(
                service, s
            )
        },
        max_message_bytes=1 << 16,
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()

    def leave():
        connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        connection.initiate_connection()
        head = {":method": "POST", ":scheme": "http", ":path": f"/{GENERATION}/{method}"}
        head |= {":authority": "x", "te": "trailers", "content-type": "application/grpc"}
        connection.send_headers(1, list(head.items()))
        connection.send_data(1, bytes(5), end_stream=True)
        with socket.create_connection(("127.0.0.1", port)) as wire:
            wire.sendall(connection.data_to_send())
            assert service.called.wait(20)
        time.sleep(0.2)  # gRPC's own threads notice it
        service.left.set()

    await asyncio.to_thread(leave)
    await server.stop(5)
    assert all(isinstance(end, asyncio.CancelledError) for end in service.ends)
    assert len(service.ends) == (method != "Detokenize")
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_unknown_method():
    async with serving() as (channel, _):
        error = await failure(raw(channel, "unary_unary", f"/{GENERATION}/No")(b""))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_health_follows_the_owner():
    async with serving() as (channel, servicer):
        stub = health_pb2_grpc.HealthStub(channel)
        status = health_pb2.HealthCheckResponse
        for name in ("", GENERATION, ENGINE):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == status.NOT_SERVING
        await rpc.set_serving(servicer, ["", GENERATION], serving=True)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=GENERATION))
        assert answer.status == status.SERVING


async def test_liveness_is_another_matter():
    async with serving() as (channel, _):
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=rpc.LIVENESS))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection_lists_the_services():
    async with serving() as (channel, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await asyncio.wait_for(call.read(), 5)
        call.cancel()
    names = {service.name for service in answer.list_services_response.service}
    assert {GENERATION, ENGINE, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("runs", [asyncio.run, uvloop.run])
def test_a_server_serves_until_it_is_stopped_however_long_that_takes(monkeypatch, runs):
    """The wait for its end is in parts, which once ended servers after an hour."""
    monkeypatch.setattr(server_module, "TERMINATION_SECONDS", 0.05)

    async def serve():
        server = grpc.aio.server()
        server.add_insecure_port("127.0.0.1:0")
        await server.start()
        waiting = asyncio.create_task(rpc.until_terminated(server))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await server.stop(None)
        await asyncio.wait_for(waiting, 5)

    runs(serve())


def test_codes_from_engines():
    assert rpc.RpcError.from_code(14, "m").code is grpc.StatusCode.UNAVAILABLE
    assert rpc.RpcError.from_code(99, "m").code is grpc.StatusCode.INTERNAL
    assert rpc.RpcError.from_code(0, "m").code is grpc.StatusCode.INTERNAL
