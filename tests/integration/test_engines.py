"""A router without an engine, over one that drains, and over two of which one is killed."""

import asyncio

import grpc
import pytest

import octavo
from benchmarks.fixture import make_model
from octavo.common.ports import free_port
from tests.integration.harness import wait_until

STREAMS = 16
SMALL = ("--num-blocks", "512", "--max-model-len", "1024", "--swap-space", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


async def outcome(stream):
    """Return how a stream ended, and how many tokens it gave."""
    tokens = 0
    try:
        async for delta in stream:
            tokens += len(delta.token_ids)
    except octavo.Error as error:
        return error.code, tokens
    return grpc.StatusCode.OK, tokens


async def test_requests_without_an_engine_then_with_one_then_while_it_drains(launch, model):
    port = free_port()
    router = launch("router", "--engine", f"127.0.0.1:{port}", "--migration-timeout", "1")
    wait_until(lambda: "listening" in router.logs(), 60, "the router listening")
    async with octavo.AsyncClient(router.address) as client:
        with pytest.raises(octavo.Error) as refused:
            await client.generate("Hello", max_tokens=1).complete()
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        engine = launch("engine", "--model", model, *SMALL, port=port)
        router.wait_ready()
        assert (await client.generate("Hello", max_tokens=1).complete()).usage.output_tokens == 1
        assert engine.metric("octavo_engine_output_tokens_total") == 1
        assert router.metric("octavo_router_output_tokens_total") == 1
        options = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
        tasks = [
            asyncio.create_task(client.generate(f"{i} times", **options).complete())
            for i in range(8)
        ]
        while engine.metric("octavo_engine_output_tokens_total") < 9:
            await asyncio.sleep(0.02)
        ended = asyncio.to_thread(engine.terminate)
        completions = await asyncio.gather(*tasks)
        assert [c.usage.output_tokens for c in completions] == [400] * 8
        assert await ended == 0, engine.logs()
    assert router.terminate() == 0, router.logs()


@pytest.mark.slow  # test_migration.py kills engines more often and compares every token
async def test_a_killed_engine_s_requests_go_on_at_the_other(launch, demo_model):
    engines = [launch("engine", "--model", "demo", *SMALL) for _ in range(2)]
    doomed, spared = engines
    flags = [flag for engine in engines for flag in ("--engine", engine.address)]
    router = launch("router", *flags)
    for server in (*engines, router):
        server.wait_ready()
    wait_until(lambda: router.metric("octavo_router_engines_up") == 2, 30, "both engines being up")
    async with octavo.AsyncClient(router.address) as client:
        options = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, "token_ids": True}
        streams = [client.generate(f"{i} plus", **options) for i in range(STREAMS)]
        tasks = [asyncio.create_task(outcome(stream)) for stream in streams]
        while any(s.metric("octavo_engine_output_tokens_total") < 8 for s in (doomed, spared)):
            await asyncio.sleep(0.02)
        doomed.kill()
        outcomes = await asyncio.gather(*tasks)
        assert outcomes == [(grpc.StatusCode.OK, 40)] * STREAMS
        assert 0 < router.metric("octavo_router_migrations_total") < STREAMS
        wait_until(lambda: router.metric("octavo_router_requests_in_flight") == 0)
        assert spared.metric("octavo_engine_blocks", state="used") == 0
    launch("engine", "--model", "demo", *SMALL, port=doomed.port).wait_ready()
    wait_until(lambda: router.metric("octavo_router_engines_up") == 2, 30, "the engine coming back")
