"""Sums over GPUs: in one kernel if all ranks can and agree, and recorded only where graphs can."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from octavo.engine.execution.cuda_graphs import RecordingError
from octavo.engine.parallel import gpu_sums
from octavo.engine.parallel.gpu_sums import share_gpus
from octavo.engine.parallel.one_shot import OneShotSums
from octavo.engine.parallel.place import RankPlace
from octavo.engine.parallel.world import World
from octavo.engine.startup.record import record, recorder

CPU = torch.device("cpu")


class Sums:
    """A fake of the shared memory of two GPUs, of which the other has the same numbers."""

    def __init__(self, *_):
        self.connected = False

    def connect(self):
        self.connected = True

    def add(self, x):
        assert self.connected
        return x * 2


class Unequal(Sums):
    """One whose results are wrong."""

    def add(self, x):
        return x * 3


class Disconnected(Sums):
    """One on GPUs that cannot read each other's memory."""

    def connect(self):
        raise RuntimeError("no peer access")


def world_of(sizes=(2, 2), other=1):
    """Return a fake world; the other rank tells `other` for success."""
    size, local = sizes
    return SimpleNamespace(
        size=size,
        rank=0,
        place=RankPlace(0, size, 0, local),
        tensors=SimpleNamespace(group_name="0"),
        one_shot=None,
        least=lambda own: [min(own, other)],
        tell_all=lambda *own: [list(own)] * 2,
    )


@pytest.mark.parametrize(
    ("sums", "world", "shared"),
    [
        (Sums, world_of(), True),
        (Sums, world_of(other=0), False),
        (Sums, world_of((2, 1)), False),  # on two machines
        (Sums, world_of((16, 16)), False),
        (Unequal, world_of(), False),
        (Disconnected, world_of(), False),
    ],
)
def test_gpus_share_memory_only_if_all_can_and_sum_right(monkeypatch, sums, world, shared):
    monkeypatch.setattr(gpu_sums, "OneShotSums", sums)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: x.mul_(2))
    share_gpus(world, CPU)
    assert (world.one_shot is not None) == shared


def test_one_kernel_sums_small_tensors_alone(monkeypatch):
    memory = SimpleNamespace(empty=torch.empty, rendezvous=lambda *_: None)
    with patch.dict("sys.modules", {"torch.distributed._symmetric_memory": memory}):
        monkeypatch.setattr(dist, "_symmetric_memory", memory)
        sums = OneShotSums("0", 4, CPU)
    sums.connect()
    small = torch.ones(8, 64, dtype=torch.bfloat16)
    assert sums.takes(small)
    assert sums.takes(small.float())
    assert not sums.takes(small.half())
    assert not sums.takes(small[:0])
    assert not sums.takes(torch.ones(3))
    assert not sums.takes(torch.ones(1 << 20))


def make_world(stages=1):
    return World(RankPlace(0, 2, 0, 2), stages, None, None, None, None)


@pytest.mark.parametrize(
    ("stages", "backend", "shared", "why"),
    [
        (1, "gloo", None, "ranks sum through gloo"),
        (1, "gloo", object(), "ranks sum through shared memory"),
        (2, "nccl", None, "stages send hidden states through the host"),
        (1, "nccl", None, None),
    ],
)
def test_what_no_graph_can_have_is_refused_by_name(stages, backend, shared, why):
    world = make_world(stages)
    found = SimpleNamespace(name=lambda: backend)
    world.tensors = SimpleNamespace(_get_backend=lambda _: found)
    world.shared = shared
    if why is None:
        assert world.unrecordable is None
        return
    with pytest.raises(RecordingError, match=why):
        recorder(world)
    executor = SimpleNamespace(record_graphs=pytest.fail)  # runs uncaptured, on all ranks
    record(executor, [], 128, world)


def test_a_step_that_fails_before_it_is_recorded_ends_the_ranks(monkeypatch):
    """The others wait in the middle of it; without ranks it runs uncaptured."""
    monkeypatch.setattr("octavo.engine.startup.record.recorder", lambda _: None)

    def fail(*_):
        raise RuntimeError("out of memory")

    executor = SimpleNamespace(record_graphs=fail)
    record(executor, [], 128)
    with pytest.raises(RuntimeError, match="out of memory"):
        record(executor, [], 128, make_world())
