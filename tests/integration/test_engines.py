"""A router without engines, with a draining engine, and with two of which one is killed."""

import asyncio

import grpc
import pytest

import octavo
from benchmarks.fixture import make_model
from octavo.common.ports import free_port
from tests.integration.harness import wait_until

SMALL = ("--num-blocks", "512", "--max-model-len", "1024", "--swap-space", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


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
