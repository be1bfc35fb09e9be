"""Engines on a Ray cluster of several nodes on this machine: ranks, lost nodes, scaling, errors."""

import asyncio
import json
from contextlib import contextmanager

import psutil
import pytest

import octavo
from benchmarks.fixture import make_model
from tests.integration.harness import wait_until

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow

START_SECONDS = 240.0
STREAMS = 12
TOKENS = 500
SMALL = (
    *("--num-blocks", "512", "--max-model-len", "2048", "--swap-space", "0.1"),
    *("--dtype", "float32", "--migration-timeout", "200"),
)
OPTIONS = {"ignore_eos": True, "token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def cluster(monkeypatch):
    """A cluster of a head without CPUs and three nodes of four, to which this process connects."""
    from ray.cluster_utils import Cluster

    memory = {"object_store_memory": 80 << 20}
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory}
    )
    for _ in range(3):
        cluster.add_node(num_cpus=4, wait=False, **memory)
    cluster.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with connected():
        yield cluster
    cluster.shutdown()


@contextmanager
def connected():
    ray.init(address="auto", namespace="octavo", log_to_driver=False)
    yield
    ray.shutdown()


def serve(launch, model, name, *flags):
    """Start `octavo serve --ray`."""
    own = ("--ray", "--ray-name", name, "--model", model, "--served-model-name", name)
    return launch("serve", *own, *SMALL, *flags, program=True)


def resources(**amounts):
    return "--ray-resources", json.dumps(amounts)


def engines_of(ranks):
    """Return, for each engine of so many ranks, the ids of the nodes that have these."""
    return [
        [group["bundles_to_node_id"][rank] for rank in range(ranks)]
        for group in ray.util.placement_group_table().values()
        if len(group["bundles"]) == ranks and group["state"] == "CREATED"
    ]


def nodes_of(ranks):
    """Return the ids of the nodes of the only engine of so many ranks."""
    (nodes,) = engines_of(ranks)
    return nodes


def rank_processes():
    """Return the processes of all actors of ranks, and the processes that these started."""
    processes = psutil.process_iter(["cmdline"])
    actors = [p for p in processes if "ray::Rank" in "".join(p.info["cmdline"] or [])]
    return [(actor, actor.children()) for actor in actors]


def ask(client, model, tokens, streams=STREAMS):
    """Return greedy and seeded streams."""
    samplings = [{"temperature": 0} if i % 2 else {"seed": i} for i in range(streams)]
    return [
        client.generate(f"{i} plus", model=model, max_tokens=tokens, **OPTIONS, **sampling)
        for i, sampling in enumerate(samplings)
    ]


async def outputs(streams):
    answers = await asyncio.gather(*(stream.complete() for stream in streams))
    return [answer.outputs[0].token_ids for answer in answers]


async def test_two_models_survive_a_node_lost_in_mid_stream(cluster, launch, model):
    """One has ranks on two nodes, of which one goes; the other's actor is killed as well."""
    wide = serve(launch, model, "wide", "--tensor-parallel-size", "2", *resources(CPU=3))
    narrow = serve(launch, model, "narrow", *resources(CPU=1))
    router = launch(
        "router",
        *("--engine", "ray://wide", "--engine", "ray://narrow", "--dns-interval", "1"),
        *("--migration-timeout", "200"),
        program=True,
    )
    for server in (wide, narrow, router):
        server.wait_ready(START_SECONDS)
    wait_until(lambda: router.metric("octavo_router_engines_up") == 2, 60, "two engines")
    assert len(set(nodes_of(2))) == 2, "a node has no room for both ranks"
    async with octavo.AsyncClient(router.address) as client:
        cards = {card.name: card for card in await client.list_models()}
        assert {name: card.ranks for name, card in cards.items()} == {"wide": 2, "narrow": 1}
        expected = await outputs([*ask(client, "wide", TOKENS), *ask(client, "narrow", TOKENS)])
        before = router.metric("octavo_router_output_tokens_total")
        running = asyncio.create_task(
            outputs([*ask(client, "wide", TOKENS), *ask(client, "narrow", TOKENS)])
        )
        while router.metric("octavo_router_output_tokens_total") < before + 10 * STREAMS:
            await asyncio.sleep(0.02)
        (lost,) = [node for node in cluster.worker_nodes if node.node_id == nodes_of(2)[1]]
        processes = [child for _, children in rank_processes() for child in children]
        await asyncio.to_thread(cluster.remove_node, lost, allow_graceful=False)
        assert await running == expected
        assert lost.node_id not in nodes_of(2)
        assert router.metric("octavo_router_migrations_total") > 0
        kept = {child.pid for _, children in rank_processes() for child in children}
        gone = [process for process in processes if process.pid not in kept]
        assert len(gone) >= 2, "both ranks of the engine that lost one"
        assert not psutil.wait_procs(gone, timeout=10)[1]

        # An actor that is killed is restarted where it was, by Ray.
        running = asyncio.create_task(outputs(ask(client, "narrow", TOKENS)))
        before = router.metric("octavo_router_output_tokens_total")
        while router.metric("octavo_router_output_tokens_total") < before + STREAMS:
            await asyncio.sleep(0.02)
        (actor,) = [
            actor
            for actor, children in rank_processes()
            if not any("WORLD_SIZE" in child.environ() for child in children)
        ]
        actor.kill()
        assert await running == expected[STREAMS:]
    for server in (wide, narrow):
        assert server.terminate() == 0, server.logs()
    assert not psutil.wait_procs([p for pair in rank_processes() for p in pair[1]], timeout=10)[1]
    assert not rank_processes()
    assert not [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]


async def test_wrong_uses_end_with_a_message_and_a_full_cluster_waits(cluster, launch, model):
    ranks = ("--tensor-parallel-size", "3")
    odd = serve(launch, model, "odd", *ranks, *resources(CPU=1))
    assert await asyncio.to_thread(odd.process.wait, START_SECONDS) == 1, odd.logs()
    assert "cannot start" in odd.logs()
    first = serve(launch, model, "same", *resources(CPU=4), "--ray-min-engines", "3")
    first.wait_ready(START_SECONDS)
    refused = {
        "has engines of the name 'same'": serve(launch, model, "same"),
        "no-such-model": serve(launch, "/no-such-model", "other"),
        "--ray-resources: no amount": serve(launch, model, "none", *resources(CPU=0)),
    }
    waiting = serve(launch, model, "waiting", *resources(CPU=4))
    for message, server in refused.items():
        assert await asyncio.to_thread(server.process.wait, START_SECONDS) == 1, server.logs()
        assert message in server.logs()
        assert "Traceback" not in server.logs()
    wait_until(lambda: "engine waits for resources" in waiting.logs(), 60, "the log line")
    assert "'CPU': 4.0" in waiting.logs()
    wait_until(lambda: first.metric("octavo_router_engines_up") == 3, START_SECONDS, "3 engines")
    assert not waiting.is_serving()
    assert first.terminate() == 0
    waiting.wait_ready(START_SECONDS)
    assert waiting.terminate() == 0
