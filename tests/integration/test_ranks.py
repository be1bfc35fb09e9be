"""An engine of ranks or stages serves, drains, and ends completely when one dies or hangs."""

import asyncio
import signal
import time
from functools import partial
from itertools import product

import psutil
import pytest

import octavo
from benchmarks.fixture import EOS, VOCABULARY, make_model, save_tokenizer
from octavo.common.ports import free_port
from tests.architectures.tiny import make_model as make_random_model
from tests.architectures.tiny import tiny_config
from tests.integration.harness import wait_until

STREAMS = 30
END_SECONDS = 10.0
TENSOR, STAGES = "--tensor-parallel-size", "--pipeline-parallel-size"
KINDS = {
    "tensor": (2, TENSOR, "2"),
    "stages": (2, STAGES, "2"),
    "experts": (2, TENSOR, "2", "--expert-parallel"),
    "stages of tensor": (4, STAGES, "2", TENSOR, "2"),
}
"""Numbers of ranks and flags, by name."""
SMALL = (
    *("--num-blocks", "512", "--max-model-len", "160", "--swap-space", "0.1"),
    *("--dtype", "float32"),
)
OPTIONS = {"max_tokens": 60, "ignore_eos": True, "token_ids": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A mixture of experts whose tokens are bytes."""
    path = tmp_path_factory.mktemp("mixture")
    config = tiny_config("qwen3_moe", {"vocab_size": VOCABULARY, "eos_token_id": EOS})
    make_random_model(config).save_pretrained(path)
    save_tokenizer(path)
    return str(path)


def ask(client):
    """Return greedy and seeded streams, not read yet."""
    samplings = [{"temperature": 0} if i % 2 else {"seed": i} for i in range(STREAMS)]
    return [
        client.generate(f"{i} plus", **OPTIONS, **sampling) for i, sampling in enumerate(samplings)
    ]


async def outputs(streams):
    """Read streams, all at once; return their tokens."""
    answers = await asyncio.gather(*(stream.complete() for stream in streams))
    return [answer.outputs[0].token_ids for answer in answers]


def process_of(engine, rank):
    """Return the process of an engine's rank: the engine's own, or a child that computes."""
    if not rank:
        return psutil.Process(engine.process.pid)
    ranks = [p for p in engine.children() if "octavo.engine.startup.follower" in p.cmdline()]
    (process,) = [p for p in ranks if p.environ()["RANK"] == str(rank)]
    return process


def all_ended(processes):
    """Return whether processes have ended, though their parent may not know."""
    return all(not p.is_running() or p.status() == psutil.STATUS_ZOMBIE for p in processes)


def assert_nothing_left(processes):
    gone, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    assert not alive, f"{alive} are left; {len(gone)} ended"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
async def test_a_rank_that_dies_or_hangs_ends_its_engine_and_no_request(
    launch, model, mixture, kind
):
    size, *flags = KINDS[kind]
    shared = ("--model", mixture if kind == "experts" else model, *SMALL)
    spared = launch("engine", *shared)
    doomed = launch("engine", *shared, *flags)
    engines = ("--engine", spared.address, "--engine", doomed.address)
    router = launch("router", *engines, "--balancing", "round_robin")  # so both have streams
    for server in (spared, doomed, router):
        server.wait_ready()

    def both_up():
        return router.metric("octavo_router_engines_up") == 2

    wait_until(both_up, 30, "both engines being up")
    async with octavo.AsyncClient(router.address) as client:
        (card,) = await client.list_models()
        assert (card.engines, card.ranks) == (2, 1 + size)
        expected = await outputs(ask(client))
        assert doomed.metric("octavo_engine_output_tokens_total") > 0, "both engines have worked"
        for number, rank in product((signal.SIGKILL, signal.SIGSTOP), reversed(range(size))):
            case = number, rank
            before = doomed.metric("octavo_engine_output_tokens_total")
            running = asyncio.create_task(outputs(ask(client)))
            while doomed.metric("octavo_engine_output_tokens_total") < before + STREAMS:
                if running.done():  # the router avoids an engine that has just failed often
                    assert running.result() == expected, case
                    running = asyncio.create_task(outputs(ask(client)))
                await asyncio.sleep(0.02)
            children = doomed.children()
            victim = process_of(doomed, rank)
            victim.send_signal(number)
            began = time.monotonic()
            if case != (signal.SIGSTOP, 0):
                code = await asyncio.to_thread(doomed.process.wait, 30)
                assert time.monotonic() - began < END_SECONDS, case
                assert code != 0
                assert_nothing_left(children)
            assert await asyncio.wait_for(running, 60) == expected, case
            if case == (signal.SIGSTOP, 0):  # their parent cannot bury the others
                wait_until(partial(all_ended, children), END_SECONDS, "the other ranks' ends")
                victim.kill()
                await asyncio.to_thread(doomed.process.wait, 30)
                assert_nothing_left(children)
            else:
                doomed = launch("engine", *shared, *flags, port=doomed.port)
                doomed.wait_ready()
                wait_until(both_up, 30, "the engine coming back")
        assert router.metric("octavo_router_migrations_total") > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "stages"])
async def test_a_rank_told_to_stop_drains_the_engine_and_ends_all(launch, model, kind):
    _, *flags = KINDS[kind]
    engine = launch("engine", "--model", model, *SMALL, *flags)
    router = launch("router", "--engine", engine.address)
    for server in (engine, router):
        server.wait_ready()
    children = engine.children()
    async with octavo.AsyncClient(router.address) as client:
        streams = ask(client)
        running = asyncio.create_task(outputs(streams))
        while any(stream.accepted is None for stream in streams):  # later ones would be refused
            await asyncio.sleep(0.02)
        process_of(engine, 1).terminate()
        code = await asyncio.to_thread(engine.process.wait, 60)
        assert all(len(tokens) == OPTIONS["max_tokens"] for tokens in await running)
    assert code == 0, engine.logs()
    assert_nothing_left(children)


@pytest.mark.slow
async def test_one_command_on_each_machine_starts_the_ranks(launch, model):
    master = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    _, *sizes = KINDS["stages of tensor"]
    shared = ("--model", model, *SMALL, *sizes, "--nnodes", "2", *master)
    one, two = (launch("engine", *shared, "--node-rank", number) for number in ("0", "1"))
    alone = launch("engine", "--model", model, *SMALL)
    routers = [launch("router", "--engine", engine.address) for engine in (one, alone)]
    for server in (one, alone, *routers):
        server.wait_ready()
    found = []
    for router in routers:
        async with octavo.AsyncClient(router.address) as client:
            found.append(await outputs(ask(client)))
    assert found[0] == found[1]
    assert one.metric("octavo_engine_ranks") == 4
    children = [*one.children(), *two.children()]
    one.process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(one.process.wait, 60) == 0, one.logs()
    assert await asyncio.to_thread(two.process.wait, 60) == 0, two.logs()
    assert_nothing_left(children)


@pytest.mark.slow
async def test_machines_say_for_whom_they_wait_and_refuse_other_flags(launch, model):
    port = str(free_port())
    master = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    shared = ("--model", model, *SMALL, TENSOR, "2", *master)
    early = launch("engine", *shared, "--node-rank", "1")
    wait_until(lambda: "waiting for machine 0" in early.logs(), 30, "a line about machine 0")
    one = launch("engine", *shared, "--node-rank", "0", "--block-size", "32")
    for engine in (early, one):
        assert await asyncio.to_thread(engine.process.wait, 60) == 1
        for flags in ("has --block-size 16", "has --block-size 32"):
            assert flags in " ".join(engine.logs().split()), engine.logs()
    alone = launch("engine", *shared, "--node-rank", "0")
    wait_until(lambda: "waiting for other ranks" in alone.logs(), 30, "a line about rank 1")
    assert f"127.0.0.1:{port}" in alone.logs()
    assert "missing=[1]" in alone.logs()
