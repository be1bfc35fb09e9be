"""Ranks log which ranks they wait for, and refuse ranks with other flags, models or versions."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog
from transformers import LlamaConfig

from octavo.common.ports import free_port
from octavo.engine.parallel.meeting import STORE, meet
from octavo.engine.parallel.place import RankError, RankPlace
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.rank_facts import rank_facts

FACTS = {"version": "1", "PyTorch": "2", "--dtype": "auto", "--block-size": "16"}
OTHER_DTYPE = FACTS | {"--dtype": "float32"}


@pytest.fixture
def address(monkeypatch):
    """The address of the store, as a launcher names it."""
    port = free_port()
    monkeypatch.delenv(STORE, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    return f"127.0.0.1:{port}"


def on_own_machine(rank, size=2):
    """Return the place of a rank that is alone on its machine."""
    return RankPlace(rank, size, 0, 1)


def outcomes(places, facts, seconds=20.0):
    """Let ranks meet, each in a thread; return the error of each, or None."""
    stores = []  # rank 0's serves the others

    def outcome(place, own):
        try:
            stores.append(meet(place, own, seconds))
        except RankError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(outcome, places, facts))


@pytest.mark.usefixtures("address")
def test_ranks_that_run_the_same_meet():
    places = [on_own_machine(rank, 3) for rank in range(3)]
    assert outcomes(places, [FACTS] * 3) == [None] * 3


def test_rank_0_says_at_once_and_at_last_which_ranks_are_missing(address):
    with structlog.testing.capture_logs() as logs, pytest.raises(RankError) as raised:
        meet(on_own_machine(0), FACTS, 0.3)
    (noted,) = logs
    assert noted["event"] == "waiting for other ranks"
    assert (noted["address"], noted["present"], noted["missing"]) == (address, [0], [1])
    assert str(raised.value).startswith(f"ranks 1 did not come to {address} within 0.3 s; ranks 0")


def test_a_rank_says_at_once_and_at_last_that_machine_0_does_not_answer(address):
    with structlog.testing.capture_logs() as logs, pytest.raises(RankError) as raised:
        meet(on_own_machine(1), FACTS, 0.3)
    assert logs[0]["event"] == "waiting for machine 0"
    assert logs[0]["address"] == address
    assert str(raised.value).startswith(f"machine 0 does not answer at {address} after 0.3 s")


@pytest.mark.usefixtures("address")
@pytest.mark.parametrize(
    ("other", "theirs", "ours"),
    [
        (OTHER_DTYPE, "--dtype float32", "--dtype auto"),
        (OTHER_DTYPE | {"version": "3"}, "version 3", "version 1"),
    ],
)
def test_ranks_that_run_other_things_refuse_each_other(other, theirs, ours):
    found = outcomes([on_own_machine(0), on_own_machine(1)], [FACTS, other])
    for rank, error in enumerate(found):
        seen = (theirs, ours) if rank == 0 else (ours, theirs)
        assert f"has {seen[0]}, but rank {rank} on " in error
        assert f" has {seen[1]}: start the same version on each machine" in error


@pytest.mark.usefixtures("address")
def test_ranks_of_another_number_refuse_each_other():
    sizes = [FACTS | {"--tensor-parallel-size": size} for size in ("2", "4")]
    found = outcomes([on_own_machine(0), RankPlace(2, 4, 0, 2)], sizes)
    assert all("--tensor-parallel-size 4" in error for error in found)


@pytest.mark.usefixtures("address")
def test_two_machines_of_one_number_are_refused():
    places = [on_own_machine(rank, 3) for rank in (0, 1, 1)]
    found = outcomes(places, [FACTS] * 3)
    assert all("each machine needs its own --node-rank" in error for error in found)


def test_facts_tell_models_and_flags_apart(tmp_path):
    paths = [tmp_path / name for name in ("one", "two")]
    for path, content in zip(paths, (b"a", b"b"), strict=True):
        LlamaConfig().save_pretrained(path)
        (path / "model.safetensors").write_bytes(content * 9000)
    shared = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "host"}
    one, *others = (
        rank_facts(EngineSettings(**shared | own), path)
        for path, own in (
            (paths[0], {"model": "one"}),
            (paths[0], {"model": "a/copy", "node_rank": 1, "port": 4, "cache_memory": 3}),
            (paths[1], {"model": "one"}),
            (paths[0], {"model": "one", "block_size": 32}),
            (paths[0], {"model": "one", "lora": ["other=here"]}),
        )
    )
    differing = [[name for name in one if other[name] != one[name]] for other in others]
    assert differing == [[], ["a --model with the digest"], ["--block-size"], ["--lora"]]
