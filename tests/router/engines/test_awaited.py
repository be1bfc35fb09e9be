"""While engines connect, an unknown model is UNAVAILABLE: clients do not retry NOT_FOUND."""

import grpc
import grpc.aio
import pytest

from octavo.common.ports import free_port
from octavo.router.engines import pool
from octavo.router.engines.discovery import Discovery
from octavo.v1 import generation_pb2


async def text(s, model: str) -> str:
    request = generation_pb2.GenerateRequest(text="prompt", model=model)
    return "".join([response.delta.text async for response in s.stub.Generate(request)])


async def code(s, model: str) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await text(s, model)
    return refused.value.code()


async def test_after_a_restart_it_is_unavailable_until_all_engines_connected(scripted, serve):
    port = free_port()
    async with serve(scripted("one"), addresses=[f"127.0.0.1:{port}"]) as s:
        await s.up()
        assert await code(s, "other") is grpc.StatusCode.UNAVAILABLE
        assert await text(s, "tiny") == "one"
        await scripted("two", model="other").start(port)
        await s.up(2)
        assert await text(s, "other") == "two"
        assert await code(s, "third") is grpc.StatusCode.NOT_FOUND


async def test_an_engine_that_never_comes_is_not_awaited_for_long(scripted, serve, monkeypatch):
    async with serve(scripted(), addresses=["127.0.0.1:1"]) as s:
        await s.up()
        assert await code(s, "other") is grpc.StatusCode.UNAVAILABLE
        monkeypatch.setattr(pool, "AWAITED_SECONDS", 0.0)
        assert await code(s, "other") is grpc.StatusCode.NOT_FOUND


async def test_a_model_whose_last_pod_disappeared_may_come_back(scripted, serve, monkeypatch):
    pods = [await scripted("a", model="other", aliases=["name"]).start() for _ in range(2)]
    addresses = {pod.address for pod in pods}

    async def resolve(name, port):
        return set(addresses)

    async with serve(scripted("static")) as s:
        found = Discovery(["dns:///pods:1"], s.router.pool, 1.0, resolve)
        await found.look()
        await s.up(3)
        addresses.remove(pods[0].address)
        await found.look()
        assert await text(s, "other") == "a"
        addresses.clear()
        await found.look()
        for name in ("other", "name"):
            assert await code(s, name) is grpc.StatusCode.UNAVAILABLE
        assert await code(s, "never") is grpc.StatusCode.NOT_FOUND
        with monkeypatch.context() as later:
            later.setattr(pool, "AWAITED_SECONDS", 0.0)
            assert await code(s, "other") is grpc.StatusCode.NOT_FOUND


async def test_a_model_whose_engine_was_removed_by_call_is_gone(scripted, serve):
    other = await scripted(model="other").start()
    async with serve(scripted(), other) as s:
        await s.up(2)
        await s.router.pool.remove(other.address)
        assert await code(s, "other") is grpc.StatusCode.NOT_FOUND
