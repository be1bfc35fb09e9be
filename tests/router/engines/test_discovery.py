"""Engines come and go while a router runs, by DNS and by operators."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from octavo.common.ports import free_port
from octavo.router.engines.discovery import Discovery, resolve
from octavo.router.settings import RouterSettings
from octavo.v1 import admin_pb2, admin_pb2_grpc, engine_pb2, generation_pb2

SERVING = admin_pb2.ENGINE_STATE_SERVING
DRAINING = admin_pb2.ENGINE_STATE_DRAINING


def ask() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="prompt")


async def text_of(call) -> str:
    return "".join([response.delta.text async for response in call])


class Names:
    """A DNS whose answers tests change."""

    def __init__(self, **answers):
        self.answers = answers

    async def resolve(self, name, port):
        if self.answers[name] is None:
            raise OSError("the name server is away")
        return set(self.answers[name])


def discovery(s, names) -> Discovery:
    targets = [f"dns:///{name}:50052" for name in names.answers]
    return Discovery(targets, s.router.pool, 1.0, names.resolve)


def addresses(s) -> list[str]:
    return [link.address for link in s.router.pool.links]


async def test_addresses_are_engines_while_they_stand_behind_the_name(scripted, serve):
    a, b = await scripted("a").start(), await scripted("b").start()
    static = scripted("static")
    names = Names(one=[a.address], two=[])
    async with serve(static) as s:
        found = discovery(s, names)
        await found.look()
        await s.up(2)
        names.answers["two"] = [a.address, b.address, static.address]
        await found.look()
        await s.up(3)
        names.answers["one"] = []
        await found.look()
        assert len(addresses(s)) == 3, "the other name has it still"
        names.answers["two"] = None
        await found.look()
        assert len(addresses(s)) == 3, "no answer is not the answer that there are none"
        names.answers["two"] = [b.address]
        await found.look()
        assert addresses(s) == sorted([b.address, static.address])
        names.answers["two"] = []
        await found.look()
        assert addresses(s) == [static.address], "what was given as it is stays"
    await a.kill()
    await b.kill()


async def test_a_retired_engine_finishes_what_it_has(scripted, serve):
    leaving = await scripted("leaving " * 20, interval=0.01).start()
    names = Names(all=[leaving.address])
    async with serve(scripted("other")) as s:
        await s.up()
        found = discovery(s, names)
        await found.look()
        await s.up(2)
        calls = [asyncio.create_task(text_of(s.stub.Generate(ask()))) for _ in range(4)]
        await s.until(lambda: leaving.playing)
        names.answers["all"] = []
        await found.look()
        assert leaving.address in addresses(s)
        assert await text_of(s.stub.Generate(ask())) == "other"
        assert sorted({*await asyncio.gather(*calls)}) == ["leaving " * 20, "other"]
        await s.clean()
        await found.look()
        assert leaving.address not in addresses(s)
        names.answers["all"] = [leaving.address]
        await found.look()
        await s.up(2)
    await leaving.kill()


async def test_a_retired_engine_that_is_back_takes_requests_again(scripted, serve):
    engine = await scripted(interval=None).start()
    names = Names(all=[engine.address])
    async with serve(addresses=["127.0.0.1:1"]) as s:
        found = discovery(s, names)
        await found.look()
        await s.up()
        call = s.stub.Generate(ask())
        await s.until(lambda: engine.submits)
        for answer, candidates in (([], 0), ([engine.address], 1)):
            names.answers["all"] = answer
            await found.look()
            links = [link for link in s.router.pool.links if link.up]
            assert sum(not link.draining for link in links) == candidates
        call.cancel()
    await engine.kill()


async def test_a_name_is_looked_up(scripted, serve):
    assert "127.0.0.1:50052" in await resolve("localhost", 50052)
    with pytest.raises(OSError):
        await resolve("no.such.name.invalid", 50052)
    engine = await scripted().start()
    port = engine.address.rpartition(":")[2]
    async with serve(addresses=[f"dns:///localhost:{port}"], dns_interval=0.1) as s:
        await s.until(lambda: engine.address in addresses(s) and s.router.pool.up())
        assert await text_of(s.stub.Generate(ask())) == "hello world"
    await engine.kill()


@pytest.mark.parametrize("engine", ["dns:///name", "dns://name:1", "http://h:1", "dns:///:5"])
def test_other_targets_are_refused(engine):
    with pytest.raises(ValueError, match="neither HOST:PORT"):
        RouterSettings(engine=[engine])


@asynccontextmanager
async def administered(serve, *engines, **settings):
    """A router with its AdminService's stub."""
    port = free_port()
    async with (
        serve(*engines, admin_port=port, **settings) as s,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield s, admin_pb2_grpc.AdminServiceStub(channel)


async def states(admin) -> dict[str, int]:
    listed = await admin.ListEngines(admin_pb2.ListEnginesRequest())
    return {engine.address: engine.state for engine in listed.engines}


async def test_engines_are_added_drained_and_removed_by_call(scripted, serve):
    first, second = scripted("first"), await scripted("second").start()
    async with administered(serve, first) as (s, admin):
        await s.up()
        added = await admin.AddEngine(admin_pb2.AddEngineRequest(address=second.address))
        assert added.engine.address == second.address
        await s.up(2)
        assert await states(admin) == {first.address: SERVING, second.address: SERVING}
        drained = await admin.DrainEngine(admin_pb2.DrainEngineRequest(address=first.address))
        assert (drained.engine.state, drained.engine.sequences) == (DRAINING, 0)
        assert drained.engine.model == "tiny"
        for _ in range(3):
            assert await text_of(s.stub.Generate(ask())) == "second"
        await admin.AddEngine(admin_pb2.AddEngineRequest(address=first.address))
        await admin.RemoveEngine(admin_pb2.RemoveEngineRequest(address=second.address))
        assert await states(admin) == {first.address: SERVING}
        assert await text_of(s.stub.Generate(ask())) == "first"
    await second.kill()


async def test_engines_are_listed_with_their_cores(scripted, serve):
    placed = scripted("a", threads=32, cpus="32-63,96-127", numa_nodes=[1])
    async with administered(serve, placed) as (s, admin):
        await s.up()
        (engine,) = (await admin.ListEngines(admin_pb2.ListEnginesRequest())).engines
        assert (engine.threads, engine.cpus) == (32, "32-63,96-127")
        assert list(engine.numa_nodes) == [1]


async def test_a_removed_engine_s_requests_migrate(scripted, serve):
    engines = [scripted("some words " * 10, interval=0.01) for _ in range(2)]
    async with administered(serve, *engines) as (s, admin):
        await s.up(2)
        calls = [asyncio.create_task(text_of(s.stub.Generate(ask()))) for _ in range(6)]
        await s.until(lambda: all(engine.playing for engine in engines))
        await admin.RemoveEngine(admin_pb2.RemoveEngineRequest(address=engines[0].address))
        assert set(await asyncio.gather(*calls)) == {"some words " * 10}
        await s.clean()
    assert len(engines[1].submits) == 6


async def test_what_cannot_be_done_is_said(scripted, serve):
    engine = scripted()
    async with administered(serve, engine) as (s, admin):
        await s.up()
        for call, request, code in (
            (admin.AddEngine, admin_pb2.AddEngineRequest(address="nowhere"), "INVALID_ARGUMENT"),
            (admin.AddEngine, admin_pb2.AddEngineRequest(address=engine.address), "ALREADY_EXISTS"),
            (admin.DrainEngine, admin_pb2.DrainEngineRequest(address="h:1"), "NOT_FOUND"),
            (admin.RemoveEngine, admin_pb2.RemoveEngineRequest(address="h:1"), "NOT_FOUND"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request)
            assert refused.value.code().name == code


async def test_the_last_engine_can_be_removed_and_another_added(scripted, serve):
    engine = scripted()
    async with administered(serve, engine) as (s, admin):
        await s.up()
        await admin.RemoveEngine(admin_pb2.RemoveEngineRequest(address=engine.address))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await text_of(s.stub.Generate(ask()))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await admin.AddEngine(admin_pb2.AddEngineRequest(address=engine.address))
        await s.up()
        assert await text_of(s.stub.Generate(ask())) == "hello world"


async def test_routers_share_engines_without_knowing_of_each_other(scripted, serve):
    engines = [scripted("shared", interval=0.005) for _ in range(2)]
    async with serve(*engines) as one, serve(*engines) as two:
        await one.up(2)
        await two.up(2)
        engines[0].info.load.MergeFrom(engine_pb2.Load(running=6))
        reported = engines[0].address
        for told in (one, two):
            await told.until(lambda s=told: any(e.load.running for e in s.router.pool.up()))
        stubs = [one.stub, two.stub] * 4
        texts = await asyncio.gather(*(text_of(stub.Generate(ask())) for stub in stubs))
        assert texts == ["shared"] * 8
        assert len(engines[1].submits) == 8, f"{reported} is known to be busy with others'"
        await one.clean()
        await two.clean()
