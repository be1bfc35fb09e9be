"""Adapters as models: two engines, a router, and clients over gRPC and HTTP."""

import asyncio
import json
import urllib.request
from types import SimpleNamespace

import grpc
import pytest

import octavo
from benchmarks.fixture import make_model
from octavo.common.ports import free_port
from octavo.v1 import admin_pb2, admin_pb2_grpc
from tests.integration.harness import wait_until
from tests.peft_adapters import greedy, merged, save_adapter

TARGETS = ["q_proj", "v_proj", "up_proj", "down_proj"]
FLAGS = (
    *("--dtype", "float32", "--compile", "off", "--num-blocks", "512", "--max-model-len", "1024"),
    *("--swap-space", "0", "--served-model-name", "base", "--served-model-name", "alias"),
)
PROMPT = list(range(40, 70))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, launch_shared):
    """Two engines with an adapter "first", their router, and two adapters' paths."""
    folder = tmp_path_factory.mktemp("adapters")
    model = make_model(folder / "model")
    paths = {
        name: save_adapter(model, folder / name, seed=seed, r=8 * seed, target_modules=TARGETS)
        for seed, name in enumerate(("first", "second"), 1)
    }
    lora = ("--lora", f"first={paths['first']}")
    engines = [launch_shared("engine", "--model", model, *FLAGS, *lora) for _ in range(2)]
    admin, http = free_port(), free_port()
    addresses = [flag for engine in engines for flag in ("--engine", engine.address)]
    router = launch_shared(
        *("router", "--admin-port", str(admin), "--http-port", str(http), *addresses),
        *("--migration-timeout", "2"),
    )
    for server in (*engines, router):
        server.wait_ready()
    with grpc.insecure_channel(f"127.0.0.1:{admin}") as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)

        def found():
            adapters = stub.ListAdapters(admin_pb2.ListAdaptersRequest()).adapters
            return [len(one.addresses) for one in adapters] == [2]

        wait_until(found)
        yield SimpleNamespace(
            router=router, engines=engines, admin=stub, http=http, model=model, paths=paths
        )


def load(cluster, name, path, address=""):
    request = admin_pb2.LoadAdapterRequest(name=name, path=str(path), address=address)
    return cluster.admin.LoadAdapter(request, timeout=60).adapter


def unload(cluster, name):
    cluster.admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name=name), timeout=60)


def refused(call, *arguments):
    with pytest.raises(grpc.RpcError) as error:
        call(*arguments)
    return error.value.code(), error.value.details()


async def tokens_of(client, model, count=24, **options):
    options = {"temperature": 0, "ignore_eos": True, "token_ids": True} | options
    done = await client.generate(PROMPT, model=model, max_tokens=count, **options).complete()
    return list(done.outputs[0].token_ids)


def models(cluster):
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.http}/v1/models") as answer:
        return {card["id"]: card["parent"] for card in json.load(answer)["data"]}


async def test_adapters_are_models(cluster):
    expected = greedy(merged(cluster.model, cluster.paths["first"]), PROMPT, 24)
    async with octavo.AsyncClient(cluster.router.address) as client:
        cards = {card.name: card.base_model for card in await client.list_models()}
        assert cards == {"base": "", "first": "base"}
        assert models(cluster) == {"alias": None, "base": None, "first": "base"}
        of_adapter, of_base, of_alias, unnamed = await asyncio.gather(
            *(tokens_of(client, model) for model in ("first", "base", "alias", ""))
        )
        assert of_adapter == expected != of_base == of_alias == unnamed
        with pytest.raises(octavo.Error) as unknown:
            await tokens_of(client, "second")
        assert unknown.value.code is grpc.StatusCode.NOT_FOUND
        assert "'second' is not served; there is: alias, base, first" in str(unknown.value)


async def test_loading_and_unloading_while_streams_run(cluster):
    expected = greedy(merged(cluster.model, cluster.paths["second"]), PROMPT, 24)
    async with octavo.AsyncClient(cluster.router.address) as client:
        running = [
            asyncio.create_task(tokens_of(client, model, 300, seed=seed, temperature=0.7))
            for seed, model in enumerate(["first", "base"] * 6)
        ]
        await asyncio.sleep(0.1)
        loaded = await asyncio.to_thread(load, cluster, "second", cluster.paths["second"])
        assert len(loaded.addresses) == 2
        assert loaded.base_model == "base"
        assert await tokens_of(client, "second") == expected
        options = {"max_tokens": 400, "temperature": 0, "ignore_eos": True, "token_ids": True}
        late = aiter(client.generate(PROMPT, model="second", **options))
        tokens = list((await anext(late)).token_ids)
        await asyncio.to_thread(unload, cluster, "second")
        assert models(cluster) == {"alias": None, "base": None, "first": "base"}
        async for delta in late:
            tokens += delta.token_ids
        assert len(tokens) == 400  # a running request keeps its adapter
        assert tokens[:24] == expected
        assert [len(tokens) for tokens in await asyncio.gather(*running)] == [300] * 12


def active(engine):
    return engine.metric("octavo_engine_groups", state="running")


def test_adapters_that_are_refused(cluster, tmp_path):
    first = cluster.paths["first"]
    code, message = refused(load, cluster, "first", first)
    assert code is grpc.StatusCode.ALREADY_EXISTS
    assert "unload it first" in message
    for name in ("base", "alias"):
        assert refused(load, cluster, name, first)[0] is grpc.StatusCode.ALREADY_EXISTS
    code, message = refused(load, cluster, "x", tmp_path / "absent")
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "is not an adapter in peft's" in message
    assert refused(load, cluster, "a name", first)[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(load, cluster, "x", "")[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(load, cluster, "x", first, "h:1")[0] is grpc.StatusCode.NOT_FOUND
    code, message = refused(unload, cluster, "x")
    assert code is grpc.StatusCode.NOT_FOUND
    assert "no engine has an adapter 'x'" in message
    listed = cluster.admin.ListAdapters(admin_pb2.ListAdaptersRequest()).adapters
    assert [entry.adapter.name for entry in listed] == ["first"]


async def test_requests_migrate_with_their_adapter(cluster):
    """Requests go to engines with their adapter, and migrate with it. It kills an engine."""
    one, other = cluster.engines
    await asyncio.to_thread(load, cluster, "second", cluster.paths["second"], one.address)
    expected = greedy(merged(cluster.model, cluster.paths["first"]), PROMPT, 400)
    async with octavo.AsyncClient(cluster.router.address) as client:
        before = other.metric("octavo_engine_output_tokens_total")
        await asyncio.gather(*(tokens_of(client, "second") for _ in range(4)))
        assert other.metric("octavo_engine_output_tokens_total") == before
        running = [asyncio.create_task(tokens_of(client, "first", 400)) for _ in range(8)]
        while not (active(one) and active(other)):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(one.kill)
        assert await asyncio.gather(*running) == [expected] * 8
        with pytest.raises(octavo.Error) as gone:
            await tokens_of(client, "second")
        assert gone.value.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["--tensor-parallel-size", "--pipeline-parallel-size"])
async def test_ranks_load_adapters_while_they_serve(kind, launch, cluster):
    ranks = (kind, "2", "--compile", "auto")
    engine = launch("engine", "--model", cluster.model, *FLAGS, *ranks, "--enable-lora")
    admin = free_port()
    router = launch("router", "--admin-port", str(admin), "--engine", engine.address)
    for server in (engine, router):
        server.wait_ready()
    expected = {
        name: greedy(merged(cluster.model, path), PROMPT, 24)
        for name, path in cluster.paths.items()
    }
    with grpc.insecure_channel(f"127.0.0.1:{admin}") as channel:
        ranked = SimpleNamespace(admin=admin_pb2_grpc.AdminServiceStub(channel))
        async with octavo.AsyncClient(router.address) as client:
            plain = await tokens_of(client, "base", 400)
            running = asyncio.create_task(tokens_of(client, "base", 400))
            for name in cluster.paths:
                await asyncio.to_thread(load, ranked, name, cluster.paths[name])
            code, why = await asyncio.to_thread(refused, load, ranked, "third", cluster.model)
            assert code is grpc.StatusCode.INVALID_ARGUMENT, why
            found = await asyncio.gather(*(tokens_of(client, name) for name in expected))
            assert found == list(expected.values())
            await asyncio.to_thread(unload, ranked, "first")
            await asyncio.to_thread(load, ranked, "first", cluster.paths["second"])
            assert await tokens_of(client, "first") == expected["second"]
            assert await running == plain
