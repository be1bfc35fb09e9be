"""Engines that fail while serving: their behaviour, and that clients notice nothing."""

import asyncio
import signal
import time

import grpc
import pytest

from benchmarks import fixture
from benchmarks.metrics import Metrics
from octavo import AsyncClient, InternalError
from octavo.common.ports import free_port
from tests.integration import sabotage
from tests.integration.harness import wait_until

PATIENCE = 60.0
REQUESTS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return fixture.make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
async def start(tmp_path):
    """Starts nodes that end with the test; `errors` has their stderr."""
    nodes = []

    async def begin(node):
        node.errors = tmp_path / f"{len(nodes)}.log"
        nodes.append(node)
        return await node.start()

    yield begin
    for node in reversed(nodes):
        await node.close()


async def complete(client, count=1, **options):
    """Send `count` requests at once; return each output's tokens, or the error."""
    options = {"max_tokens": 12, "temperature": 0, "ignore_eos": True} | options
    asks = [client.generate(f"question {i}", **options).complete() for i in range(count)]
    async with asyncio.timeout(PATIENCE):
        return await asyncio.gather(*asks, return_exceptions=True)


async def test_an_engine_whose_every_step_fails_exits_and_its_peer_serves_all(model, start):
    broken = await start(fixture.engine(model, max_num_seqs=8, sabotage=sabotage.fail_every_step))
    sound = await start(fixture.engine(model, max_num_seqs=8))
    router = await start(fixture.router([broken.address, sound.address]))
    await fixture.all_up(router, 2)
    async with AsyncClient(router.address) as client:
        done = await complete(client, REQUESTS)
        assert [c.usage.output_tokens for c in done] == [12] * REQUESTS
        deadline = time.monotonic() + PATIENCE
        while broken.exitcode is None and time.monotonic() < deadline:
            assert [c.usage.output_tokens for c in await complete(client, 4)] == [12] * 4
    assert broken.exitcode == 1
    assert "3 steps in a row failed" in broken.errors.read_text()


async def test_a_request_that_fails_on_two_engines_is_not_tried_on_a_third(model, start):
    engines = [
        await start(fixture.engine(model, max_failed_steps=100, sabotage=sabotage.fail_every_step))
        for _ in range(3)
    ]
    router = await start(
        fixture.router([e.address for e in engines], metrics_port=(port := free_port()))
    )
    await fixture.all_up(router, 3)
    async with AsyncClient(router.address) as client:
        (error,) = await complete(client)
    assert isinstance(error, InternalError)
    assert migrations(port) == 1


async def test_without_another_engine_a_failed_step_is_told_at_once(model, start):
    engine = await start(fixture.engine(model, sabotage=sabotage.fail_one_step))
    router = await start(fixture.router([engine.address]))
    await fixture.all_up(router, 1)
    async with AsyncClient(router.address) as client:
        (error,) = await complete(client)
        assert error.code is grpc.StatusCode.INTERNAL
        (after,) = await complete(client)
    assert after.usage.output_tokens == 12
    assert engine.exitcode is None


async def test_events_that_cannot_be_handed_over_lose_no_request(model, start):
    engine = await start(fixture.engine(model, sabotage=sabotage.lose_events_once))
    router = await start(fixture.router([engine.address]))
    await fixture.all_up(router, 1)
    async with AsyncClient(router.address) as client:
        done = await complete(client, 12)
    assert [c.usage.output_tokens for c in done] == [12] * 12


async def test_a_long_step_is_no_hang_and_a_stopped_process_is_one(model, start):
    slow = await start(fixture.engine(model, sabotage=sabotage.take_long))
    port = free_port()
    # A step's first heartbeat may come 2.5 s after its start: after 1.5 s, checked every second.
    router = await start(fixture.router([slow.address], heartbeat_timeout=3, metrics_port=port))
    await fixture.all_up(router, 1)
    async with AsyncClient(router.address) as client:
        done = await complete(client, 3)
        assert [c.usage.output_tokens for c in done] == [12] * 3
        assert migrations(port) == 0
        slow.signal(signal.SIGSTOP)
        await asyncio.to_thread(wait_until, lambda: engines_up(port) == 0, PATIENCE)
        slow.signal(signal.SIGCONT)
        await fixture.all_up(router, 1)


@pytest.mark.parametrize(
    "trouble",
    [sabotage.hang_with_the_lock, pytest.param(sabotage.hang, marks=pytest.mark.slow)],
)
async def test_a_step_that_never_ends_ends_the_engine(model, start, trouble):
    hung = await start(fixture.engine(model, step_timeout=3, sabotage=trouble))
    sound = await start(fixture.engine(model))
    router = await start(fixture.router([hung.address, sound.address], heartbeat_timeout=30))
    await fixture.all_up(router, 2)
    async with AsyncClient(router.address) as client:
        done = await complete(client, 8)
    assert [c.usage.output_tokens for c in done] == [12] * 8
    assert hung.exitcode == 1
    assert "Timeout (0:00:04)!" in hung.errors.read_text()


def migrations(metrics_port):
    return Metrics(metrics_port).value("octavo_router_migrations_total")


def engines_up(metrics_port):
    return Metrics(metrics_port).value("octavo_router_engines_up")
