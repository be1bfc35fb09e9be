"""`octavo router --workers 2` acts as one router, and survives a dead worker."""

import asyncio
import json
import os
import re
import signal
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack
from types import SimpleNamespace

import grpc
import psutil
import pytest

import octavo
from benchmarks.fixture import OwnConnection, make_model
from benchmarks.metrics import Metrics
from octavo.common.ports import free_port
from octavo.v1 import admin_pb2, admin_pb2_grpc
from tests.integration.harness import wait_until
from tests.peft_adapters import save_adapter

FLAGS = (
    *("--dtype", "float32", "--compile", "off", "--num-blocks", "2048", "--max-model-len", "1024"),
    *("--swap-space", "0", "--served-model-name", "tiny", "--enable-lora"),
)
CONNECTIONS = 64
LONG = {"max_tokens": 600, "ignore_eos": True}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, launch_shared):
    """Two engines, and a router with two workers and the first engine."""
    folder = tmp_path_factory.mktemp("model")
    model = make_model(folder / "model")
    adapter = save_adapter(model, folder / "adapter", seed=1, target_modules=["q_proj"])
    engines = [launch_shared("engine", "--model", model, *FLAGS) for _ in range(2)]
    admin, http = free_port(), free_port()
    router = launch_shared(
        *("router", "--workers", "2", "--engine", engines[0].address, "--log-format", "json"),
        *("--admin-port", str(admin), "--http-port", str(http)),
        program=True,  # a restarted worker is not forked from a process that uses gRPC
    )
    for server in (*engines, router):
        server.wait_ready()
    wait_until(lambda: '"router is ready"' in router.logs(), 60, "all workers")
    wait_until(lambda: router.metric("octavo_router_engines_up") == 1)
    with grpc.insecure_channel(f"127.0.0.1:{admin}") as channel:
        yield SimpleNamespace(
            router=router,
            engines=engines,
            adapter=str(adapter),
            admin=admin_pb2_grpc.AdminServiceStub(channel),
            http=f"http://127.0.0.1:{http}",
        )


def events(router, name):
    """Return a log's lines of an event."""
    lines = [json.loads(line) for line in router.logs().splitlines() if line.startswith("{")]
    return [line for line in lines if line["event"] == name]


def pids(router):
    """Return the process ids of the workers, by number."""
    return {line["worker"]: line["pid"] for line in events(router, "worker up")}


async def complete(address, count, **options):
    """Send a request on each of `count` connections; return each one's worker, from the log."""
    options = {"max_tokens": 1, **options}
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(OwnConnection(address)) for _ in range(count)]
        return await asyncio.gather(*(c.generate("Hello", **options).complete() for c in clients))


def workers_of(router, since):
    """Return how many of the last requests each worker has logged."""
    return Counter(line["worker"] for line in events(router, "request done")[since:])


def done(router):
    return len(events(router, "request done"))


def status_of(cluster):
    listed = cluster.admin.ListEngines(admin_pb2.ListEnginesRequest(), timeout=10).engines
    return {engine.address: engine for engine in listed}


def get_status(cluster):
    with urllib.request.urlopen(f"{cluster.http}/status", timeout=5) as answer:
        return json.load(answer)


async def test_connections_are_spread_and_the_page_has_the_sums(cluster):
    router, before = cluster.router, done(cluster.router)
    tokens = router.metric("octavo_router_output_tokens_total")
    await complete(router.address, CONNECTIONS, max_tokens=3, ignore_eos=True)
    wait_until(lambda: done(router) == before + CONNECTIONS, what="the log")
    spread = workers_of(router, before)
    assert set(spread) == {0, 1}
    assert min(spread.values()) > CONNECTIONS // 8
    page = router.metrics()
    assert page.value("octavo_router_output_tokens_total") - tokens == 3 * CONNECTIONS
    assert page.value("octavo_router_ttft_seconds_count") == done(router)
    assert page.value("octavo_router_workers") == 2
    assert page.value("octavo_router_engines_up") == 1
    assert page.value("octavo_router_info") == 1
    assert page.value("octavo_router_requests_in_flight") == 0
    for process in ("0", "1", "parent"):
        assert page.value("process_resident_memory_bytes", worker=process) > 1e7


async def test_http_shows_the_whole_router(cluster):
    before = done(cluster.router)
    pages = [Metrics(int(cluster.http.rpartition(":")[2])) for _ in range(4)]
    assert {p.value("octavo_router_requests_total") for p in pages} == {before}
    async with OwnConnection(cluster.router.address) as client:
        deltas = aiter(client.generate("Hello", **LONG))
        await anext(deltas)
        for _ in range(4):  # any worker may answer
            status = await asyncio.to_thread(get_status, cluster)
            assert status["requests"] == 1
            (engine,) = status["engines"]
            assert engine["sequences"] == 1
            assert "address" not in engine
        await deltas.aclose()


async def test_a_loaded_adapter_is_known_to_all_workers(cluster):
    load = admin_pb2.LoadAdapterRequest(name="extra", path=cluster.adapter)
    assert cluster.admin.LoadAdapter(load, timeout=30).adapter.base_model == "tiny"
    await complete(cluster.router.address, 16, model="extra")
    with pytest.raises(grpc.RpcError) as refused:
        cluster.admin.LoadAdapter(load, timeout=30)
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    listed = cluster.admin.ListAdapters(admin_pb2.ListAdaptersRequest(), timeout=10).adapters
    assert [adapter.adapter.name for adapter in listed] == ["extra"]
    cluster.admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name="extra"), timeout=30)
    for _ in range(8):
        with pytest.raises(octavo.NotFoundError):
            await complete(cluster.router.address, 1, model="extra")


async def test_engines_are_added_drained_and_removed_in_all_workers(cluster):
    first, second = (engine.address for engine in cluster.engines)
    cluster.admin.AddEngine(admin_pb2.AddEngineRequest(address=second), timeout=10)
    wait_until(lambda: cluster.router.metric("octavo_router_engines_up") == 2)
    with pytest.raises(grpc.RpcError) as refused:
        cluster.admin.AddEngine(admin_pb2.AddEngineRequest(address=second), timeout=10)
    assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
    with pytest.raises(grpc.RpcError) as refused:
        cluster.admin.AddEngine(admin_pb2.AddEngineRequest(address="nowhere"), timeout=10)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "google.rpc.badrequest" in str(refused.value.trailing_metadata()).lower()
    cluster.admin.DrainEngine(admin_pb2.DrainEngineRequest(address=first), timeout=10)
    assert status_of(cluster)[first].state == admin_pb2.ENGINE_STATE_DRAINING
    counted = cluster.engines[1].metric("octavo_engine_output_tokens_total")
    await complete(cluster.router.address, 16)
    assert cluster.engines[1].metric("octavo_engine_output_tokens_total") - counted == 16
    cluster.admin.AddEngine(admin_pb2.AddEngineRequest(address=first), timeout=10)
    cluster.admin.RemoveEngine(admin_pb2.RemoveEngineRequest(address=first), timeout=10)
    assert set(status_of(cluster)) == {second}
    with pytest.raises(grpc.RpcError) as refused:
        cluster.admin.RemoveEngine(admin_pb2.RemoveEngineRequest(address=first), timeout=10)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_killed_worker_takes_its_own_streams_along_and_comes_back(cluster):
    """Its engines are as AdminService left them in the previous test."""
    router, second = cluster.router, cluster.engines[1]
    doomed = pids(router)[0]
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(OwnConnection(router.address)) for _ in range(16)
        ]
        tasks = [asyncio.create_task(c.generate("Hi", **LONG).complete()) for c in clients]
        wait = asyncio.to_thread(
            wait_until,
            lambda: (
                status_of(cluster)[second.address].sequences == 16
                and router.metric("octavo_router_output_tokens_total") > 100
            ),
        )
        await wait
        counted = router.metric("octavo_router_output_tokens_total")
        ended = done(router)
        os.kill(doomed, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [result for result in results if isinstance(result, Exception)]
    assert 0 < len(failed) < 16
    assert {error.code for error in failed} == {grpc.StatusCode.UNAVAILABLE}
    assert all(c.usage.output_tokens == LONG["max_tokens"] for c in results if c not in failed)
    assert workers_of(router, ended) == {1: 16 - len(failed)}
    assert router.metric("octavo_router_output_tokens_total") >= counted
    await complete(router.address, 8)  # the other worker serves
    wait_until(lambda: pids(router)[0] != doomed, 30, "the worker's return")
    assert router.metric("octavo_router_worker_restarts_total") == 1
    assert router.metric("octavo_router_workers") == 2
    assert set(status_of(cluster)) == {second.address}
    before = done(router)
    await complete(router.address, CONNECTIONS)
    wait_until(lambda: done(router) == before + CONNECTIONS, what="the log")
    assert set(workers_of(router, before)) == {0, 1}
    (line,) = events(router, "worker ended")
    assert (line["worker"], line["reason"][:17]) == (0, "killed by SIGKILL")


async def test_a_router_drains_all_workers(launch, cluster):
    """It uses the engine that previous tests left."""
    router = launch("router", "--workers", "2", "--engine", cluster.engines[1].address)
    router.wait_ready()
    wait_until(lambda: "router is ready" in router.logs())
    engine = cluster.engines[1]
    async with asyncio.timeout(120), AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(OwnConnection(router.address)) for _ in range(16)
        ]
        # A worker listens only once it has the engine.
        await asyncio.gather(*(c.generate("Hi", max_tokens=1).complete() for c in clients))
        tasks = [asyncio.create_task(c.generate("Hi", **LONG).complete()) for c in clients]
        wait = asyncio.to_thread(
            wait_until, lambda: engine.metric("octavo_engine_batch_sequences") == 16
        )
        await wait
        ended = asyncio.create_task(asyncio.to_thread(router.terminate))
        wait = asyncio.to_thread(
            wait_until, lambda: len(re.findall("router draining", router.logs())) == 3
        )
        await wait
        with pytest.raises(octavo.Error) as refused:
            await clients[0].generate("Hi", max_tokens=1).complete()
        assert refused.value.code is grpc.StatusCode.UNAVAILABLE
        completions = await asyncio.gather(*tasks)
        assert {c.usage.output_tokens for c in completions} == {LONG["max_tokens"]}
        assert await ended == 0, router.logs()


def test_workers_end_with_a_killed_parent(launch, cluster):
    router = launch("router", "--workers", "2", "--engine", cluster.engines[1].address)
    wait_until(lambda: "router is ready" in router.logs(), 60, "all workers")
    workers = [child for child in router.children() if child.is_running()]
    assert len(workers) >= 2
    router.kill()
    psutil.wait_procs(workers, timeout=10)
    assert not [w for w in workers if w.is_running() and w.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_that_workers_share_is_taken_for_others(launch, cluster, workers):
    port = cluster.router.port
    other = launch("router", "--workers", workers, "--engine", "127.0.0.1:9", port=port)
    assert other.process.wait(60) == 1
    assert f"cannot listen on 127.0.0.1:{port} (address already in use)" in " ".join(
        other.logs().split()
    )
