"""Engines on their own cores: which cores, how they share work, and how they end."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from transformers import AutoConfig, LlamaConfig

import octavo
from tests.engine.random_model import TINY, save_random_model
from tests.integration.conftest import SMALL

FLAGS = ("--tokenizer", "demo", *SMALL, "--compile", "off")
CPUS = sorted(os.sched_getaffinity(0))[:2]
pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


def engines_of(server) -> list[psutil.Process]:
    """Return the child processes that listen, by metrics port."""

    def ports(process):
        found = process.net_connections("tcp")
        return [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]

    found = {min(ports(child)): child for child in server.children() if ports(child)}
    return [found[port] for port in sorted(found)]


def affinities(process: psutil.Process) -> set[tuple[int, ...]]:
    """Return the CPUs of each of its threads."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return {tuple(sorted(os.sched_getaffinity(int(task.name)))) for task in tasks}


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[\d;]*m", "", text)


@pytest.fixture(scope="session")
def model(demo_model, tmp_path_factory):
    """A model that loads quickly, with the demo's vocabulary."""
    path = tmp_path_factory.mktemp("model")
    vocabulary = AutoConfig.from_pretrained(demo_model).vocab_size
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": 2048}
    save_random_model(LlamaConfig(**TINY | sizes), path, std=0.1)
    return str(path)


@pytest.fixture
def two_nodes(model, launch, tmp_path):
    """Starts `octavo serve` on a machine of two nodes, and waits until it is ready."""

    def start(*flags):
        module = ("tests.integration.two_nodes", str(tmp_path / "machine"))
        return launch("serve", model, *FLAGS, *flags, module=module).wait_ready()

    return start


@pytest.mark.slow  # tests/octavo/test_engine_plan.py has the plan
def test_each_node_has_an_engine_and_all_end_when_one_dies(two_nodes):
    """The default. Node 1 does not really exist, so its memory cannot be bound."""
    server = two_nodes()
    engines = engines_of(server)
    assert [affinities(engine) for engine in engines] == [{(cpu,)} for cpu in CPUS]
    for node, port in enumerate((server.metrics_port + 1, server.metrics_port + 2)):
        facts = {"cpus": str(CPUS[node]), "numa_nodes": str(node), "threads": "1"}
        assert server.metric("octavo_engine_info", port=port, **facts) == 1
    assert "memory is not bound to its NUMA node" in plain(server.logs())

    def ask(number: int) -> int:
        with octavo.Client(server.address) as client:
            text = client.generate(f"{number}:", max_tokens=12, ignore_eos=True).complete()
        return text.usage.output_tokens

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(ask, range(6))) == 6 * 12
    for port in (server.metrics_port + 1, server.metrics_port + 2):
        assert server.metric("octavo_engine_requests_total", port=port, outcome="finished") > 0

    engines[1].send_signal(signal.SIGKILL)
    assert server.process.wait(30) == 1
    assert f"engine 2 of 2 (node 1, CPUs {CPUS[1]}) ended unexpectedly" in server.logs()
    assert not engines[0].is_running()


def test_more_engines_than_cores_are_an_error(model, launch):
    many = str(len(os.sched_getaffinity(0)) + 1)
    server = launch("serve", model, *FLAGS, "--engines-per-node", many)
    assert server.process.wait(60) == 1
    assert f"error: --engines-per-node is {many}, but node 0 allows at most" in server.logs()
    assert "Traceback" not in server.logs()
