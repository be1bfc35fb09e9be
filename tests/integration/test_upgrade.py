"""Processes of the last release beside today's, exchanged one at a time under load.

The last release is the commit that wrote protos/released.binpb. It runs with today's packages.
"""

import asyncio
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from benchmarks.fixture import make_model
from octavo import AsyncClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
OUTPUT = "octavo_engine_output_tokens_total"
STREAMS = 8
LENGTH = 200
SMALL = ("--num-blocks", "512", "--max-model-len", "1024", "--swap-space", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """The last release's sources, with its stubs."""
    folder = tmp_path_factory.mktemp("released")
    git = ["git", "-C", str(ROOT)]
    log = [*git, "log", "-1", "--format=%H", "--", "protos/released.binpb"]
    commit = subprocess.run(log, capture_output=True, text=True, check=False).stdout.strip()
    shallow = [*git, "rev-parse", "--is-shallow-repository"]
    if not commit or subprocess.run(shallow, capture_output=True, check=True).stdout != b"false\n":
        pytest.skip("needs the history of the repository")
    sources = subprocess.run([*git, "archive", commit], stdout=subprocess.PIPE, check=True).stdout
    subprocess.run(["tar", "--extract", "--directory", folder], input=sources, check=True)
    subprocess.run([sys.executable, "protos/generate.py"], cwd=folder, check=True)
    return folder


@pytest.fixture
def launch_released(launch, released, tmp_path, monkeypatch):
    """Starts servers of the last release."""

    def start(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setenv("PYTHONPATH", str(released))
            patch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
            return launch(*arguments, program=True, **options)

    return start


def launch_engine(start, model, port=None):
    return start("engine", "--model", model, "--dtype", "float32", *SMALL, port=port).wait_ready()


def launch_router(start, *ports):
    engines = [flag for port in ports for flag in ("--engine", f"127.0.0.1:{port}")]
    return start("router", *engines)


async def engines_up(client, number):
    async with asyncio.timeout(60):
        while sum(model.engines for model in await client.list_models()) != number:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def load(client):
    """Stream requests until the block ends; all must succeed with their whole length."""
    ended, completed = asyncio.Event(), 0

    async def ask(number):
        nonlocal completed
        while not ended.is_set():
            options = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0}
            completion = await client.generate(f"{number} and {completed}", **options).complete()
            assert completion.usage.output_tokens == LENGTH
            completed += 1

    async with asyncio.TaskGroup() as tasks:
        for number in range(STREAMS):
            tasks.create_task(ask(number))
        yield lambda: completed
        ended.set()


async def exchange(engine, launch, model, client, completed):
    """Replace an engine by one of another version at its port, and serve with it for a while."""
    assert await asyncio.to_thread(engine.terminate) == 0, engine.logs()
    successor = await asyncio.to_thread(launch_engine, launch, model, engine.port)
    await engines_up(client, 2)
    before = completed()
    while completed() < before + 4 * STREAMS or not successor.metric(OUTPUT):
        await asyncio.sleep(0.1)
    return successor


@pytest.mark.parametrize("router_is_released", [False, True])
async def test_engines_of_a_release_are_exchanged_under_load(
    launch, launch_released, model, router_is_released
):
    """Two engines become today's, and the first goes back to the release's, without a failure."""
    engines = [launch_engine(launch_released, model) for _ in range(2)]
    start = launch_released if router_is_released else launch
    router = launch_router(start, *(engine.port for engine in engines)).wait_ready()
    async with AsyncClient(router.address) as client:
        await engines_up(client, 2)
        async with load(client) as completed:
            for version in (launch, launch, launch_released):
                old = engines.pop(0)
                engines.append(await exchange(old, version, model, client, completed))
        assert completed() > 12 * STREAMS
    assert router.terminate() == 0, router.logs()
