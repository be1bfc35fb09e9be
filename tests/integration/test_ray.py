"""Engines on a Ray cluster of several nodes on this machine: ranks, lost nodes, scaling, errors."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

import octavo
from benchmarks.fixture import make_model
from octavo.common.ports import free_port
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


async def test_a_node_that_drains_is_left_before_it_goes(cluster, launch, model):
    server = serve(launch, model, "moving", *resources(CPU=4))
    server.wait_ready(START_SECONDS)
    (node,) = nodes_of(1)
    async with octavo.AsyncClient(server.address) as client:
        expected = await outputs(ask(client, "moving", TOKENS))
        drain(cluster, node)
        seconds = time.monotonic() + START_SECONDS
        while [node] in engines_of(1):
            assert await outputs(ask(client, "moving", TOKENS)) == expected
            assert time.monotonic() < seconds, server.logs()
        assert await outputs(ask(client, "moving", TOKENS)) == expected
    assert "engine leaves a node that drains" in server.logs()
    assert "engine stopped" in server.logs()
    assert "engine lost" not in server.logs()


def drain(cluster, node):
    """Tell a node to drain, as `ray start` does when it gets SIGTERM."""
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
    deadline = int(time.time() * 1000) + 600_000
    gcs = cluster.head_node.get_gcs_client()
    accepted, message = gcs.drain_node(node, reason, "a test", deadline)
    assert accepted, message


@pytest.fixture
def scaled(tmp_path, monkeypatch):
    """A cluster whose autoscaler adds and removes nodes of one CPU, three at most."""
    port = free_port()
    address = f"{ray.util.get_node_ip_address()}:{port}"
    commands = ("initialization", "setup", "head_setup", "worker_setup")
    starts = ("head_start_ray", "worker_start_ray")
    config = {
        **{f"{name}_commands": [] for name in (*commands, *starts)},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
        "cluster_name": "scaled",
        "max_workers": 3,
        "idle_timeout_minutes": 0.2,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,  # all have one address
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": 1, "object_store_memory": 80 << 20},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 3,
            },
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 10,
    }
    file = tmp_path / "autoscaling.json"
    file.write_text(json.dumps(config))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    fake = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    with (tmp_path / "ray.log").open("wb") as log:
        head = subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--port", str(port), "--num-cpus", "0", "--include-dashboard", "false"),
                *("--object-store-memory", str(80 << 20), f"--autoscaling-config={file}"),
            ],
            env=os.environ | fake,
            stdout=log,
            stderr=log,
        )
    text = (tmp_path / "ray.log").read_text
    wait_until(lambda: "To connect to this Ray cluster" in text(), 120, "the head")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with connected():
        yield
    processes = psutil.Process(head.pid).children(recursive=True)
    head.send_signal(signal.SIGTERM)
    for process in [*processes, head]:
        process.kill()
    head.wait(10)


async def test_engines_and_nodes_come_with_the_load_and_go_without(scaled, launch, model):
    server = serve(
        launch,
        model,
        "scaled",
        *resources(CPU=1),
        *("--ray-max-engines", "3", "--ray-target-wait", "0.5", "--ray-scale-down-delay", "10"),
        *("--max-num-seqs", "2", "--dns-interval", "1"),
    )
    server.wait_ready(START_SECONDS)
    assert engines(server) == 1
    seen = {1}
    async with octavo.AsyncClient(server.address) as client:
        expected = await outputs(ask(client, "scaled", 300, 1))

        async def keep_asking():
            while max(seen) < 3:
                assert await outputs(ask(client, "scaled", 300, 1)) == expected

        callers = [asyncio.create_task(keep_asking()) for _ in range(24)]
        seconds = time.monotonic() + START_SECONDS
        while max(seen) < 3:
            assert time.monotonic() < seconds, server.logs()
            await asyncio.sleep(0.2)
            seen.add(engines(server))
        assert len(workers()) == 3, "the autoscaler has added a node for each"
        await asyncio.gather(*callers)
        began = time.monotonic()
        while engines(server) > 1 or len(workers()) > 1:
            assert time.monotonic() < began + START_SECONDS, server.logs()
            await asyncio.sleep(0.5)
        assert await outputs(ask(client, "scaled", 300, 1)) == expected
    assert "engine lost" not in server.logs(), "each has drained"
    assert server.terminate() == 0


def engines(server):
    return int(server.metric("octavo_router_engines_up"))


def workers():
    return [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU")]
