"""Ranks' positions, and messages from rank 0."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from octavo.common.settings import SettingsError
from octavo.common.topology import Core, Node
from octavo.engine.attention.operator import current_step
from octavo.engine.execution import inputs
from octavo.engine.execution.follower import Follower
from octavo.engine.execution.graph_sizes import graph_sizes
from octavo.engine.execution.inputs import idle_arrays
from octavo.engine.execution.leader import Leader
from octavo.engine.execution.rank_messages import Kind, RankStep, read_message
from octavo.engine.execution.step_arrays import StepArrays
from octavo.engine.kv_cache import Transfers
from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import CacheTensors
from octavo.engine.models.sharding.rank_forward import RankForward
from octavo.engine.parallel.messages import MessageRoom, join_broadcasts
from octavo.engine.parallel.place import Machines, RankError, RankPlace, place_from_launcher
from octavo.engine.settings import EngineSettings
from tests.engine.execution.recording import Again
from tests.plain import shape


def test_a_step_arrives_as_it_was_sent():
    numbers = np.random.default_rng(0)
    arrays = StepArrays(
        laid=numbers.integers(-1, 1 << 40, (4, 9)),
        query_starts=np.array([0, 4, 9], np.int32),
        query_lens=np.array([4, 5], np.int32),
        seq_lens=np.array([7, 5], np.int32),
        rows=np.array([3, 8, 8]),
        tables=[
            numbers.integers(0, 99, (2, 5)).astype(np.int32),
            np.zeros((2, 1), np.int32),
        ],
    )
    transfers = Transfers([(1, 2)], [], [(3, 4), (5, 6)])
    step = RankStep(transfers, arrays, True, 3, True, 64, [7, -1])
    kind, numbers, packed = read_message(step.message())
    assert kind is Kind.STEP
    read = RankStep.read(numbers, packed)
    assert replace(read, arrays=arrays) == step
    found = read.arrays
    for name in ("laid", "query_starts", "query_lens", "seq_lens", "rows"):
        sent, got = getattr(arrays, name), getattr(found, name)
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype
    for sent, got in zip(arrays.tables, found.tables, strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype


def test_messages_of_any_length_arrive_mostly_by_one_broadcast():
    numbers = np.random.default_rng(0)
    sender, receiver = MessageRoom(), MessageRoom()
    lengths = [0, 1, 4080, 4081, 100_000, 3, *numbers.integers(0, 20_000, 40), *[30_000] * 20]
    counts = []
    for length in lengths:
        message = numbers.integers(0, 256, length, np.uint8)
        parts = sender.split(message)
        assert len(parts[0]) == receiver.size
        rest = receiver.rest_of(parts[0])
        assert [rest] == [len(part) for part in parts[1:]] or rest == 0 == len(parts) - 1
        found = join_broadcasts(parts[0], np.concatenate([*parts[1:], np.empty(0, np.uint8)]))
        np.testing.assert_array_equal(found, message)
        counts.append(len(parts))
    assert counts[-19:] == [1] * 19
    assert receiver.size == sender.size == 32_768  # long messages are forgotten


class Wire:
    """Both ends of rank 0's messages."""

    def __init__(self):
        self.sent = []

    def send(self, numbers):
        self.sent.append(numbers)

    def receive(self):
        return self.sent.pop(0)

    def least(self, *numbers):
        return list(numbers)

    def flush(self):
        pass


class Forward(RankForward):
    """A fake of a rank's part, which notes the plan of each step."""

    def __init__(self):
        self.plans = []

    def begin(self, _, __, logit_rows, run=None):
        assert run is None
        self.plans += [group.plan for group in current_step().groups]
        return torch.zeros((len(logit_rows), 4))

    def logits(self, _):
        pass


def follower_on(device, wire, events=None):
    """Return a follower of a small model, and its fake forward pass."""
    kind = torch.bfloat16
    layout = plan_layout(shape(1, 2, 2, 8, 100, 64), 16, kind, kind)
    given = {"num_swap_blocks": 0, "dtype": kind, "device": torch.device("cpu")}
    forward = Forward()
    loaded = SimpleNamespace(
        device=torch.device(device), dtype=kind, cache_dtype=kind, kv_scales=None, forward=forward
    )

    def allocate(blocks, _):
        return CacheTensors(layout, num_blocks=blocks, **given)

    def count(cache, graph_bytes):
        events.append(("count", graph_bytes))
        return len(cache.device), 0

    follower = Follower(wire, loaded, allocate, count, recorder=lambda: Again().record)
    return follower, forward, layout


def test_other_ranks_warm_up_for_the_same_longest_sequence(monkeypatch):
    monkeypatch.setattr(inputs, "plan_attention", lambda _, seq_lens, __: seq_lens.tolist())
    wire = Wire()
    follower, forward, layout = follower_on("cpu", wire)
    leader = Leader(wire)
    arrays = idle_arrays([1, 2], layout)
    leader.run(Transfers(), arrays, most_likely=False, longest=4096)
    leader.run(Transfers(), arrays, most_likely=False)
    leader.stop()
    follower.run()
    assert forward.plans == [[4096, 4096], [1, 2]]


def test_other_ranks_count_without_the_peak_of_loading(monkeypatch):
    events = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: events.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: events.append("reset"))
    wire = Wire()
    follower, *_ = follower_on("cuda", wire, events)
    leader = Leader(wire)
    leader.allocate(3, 0)
    leader.count(5, 0)
    leader.stop()
    follower.run()
    assert events == ["empty", "reset", ("count", 0)]


def test_other_ranks_count_without_what_graphs_take(monkeypatch):
    events, left = [], [900]

    def free(_):
        left[0] -= 10
        return left[0]

    monkeypatch.setattr("octavo.engine.execution.follower.free_memory", free)
    wire = Wire()
    follower, *_ = follower_on("cpu", wire, events)
    leader, sizes = Leader(wire), graph_sizes(4)
    leader.record(Kind.MEASURE, sizes, 64, None)
    leader.count(5, 0)
    leader.record(Kind.RECORD, sizes, 64, None)
    leader.stop()
    follower.run()
    assert events == [("count", 20)]  # two graphs
    assert follower._recorded._sizes == sizes


def test_ranks_of_a_machine_divide_its_cores():
    nodes = tuple(Node(n, tuple(Core((4 * n + i,)) for i in range(4))) for n in range(2))
    shares = [RankPlace(rank, 3, rank, 3).share_of(nodes) for rank in range(3)]
    cpus = [[core.cpus[0] for node in share for core in node.cores] for share in shares]
    assert sorted(cpu for own in cpus for cpu in own) == list(range(8))
    assert {len(own) for own in cpus} == {2, 3}
    few = [RankPlace(rank, 9, rank, 9).share_of(nodes) for rank in range(9)]
    assert all(len(share) == len(share[0].cores) == 1 for share in few)
    assert RankPlace(1, 2, 1, 2).share_of((Node(0, (Core((0,)),)),))[0].cores == (Core((0,)),)


def test_machines_have_as_many_ranks_each():
    places = Machines(2, 1, "host", 29500).places(4)
    assert places == [RankPlace(2, 4, 0, 2), RankPlace(3, 4, 1, 2)]
    assert Machines().places(2) == [RankPlace(0, 2, 0, 2), RankPlace(1, 2, 1, 2)]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nnodes": 2, "master_addr": "host"}, "--nnodes 2 does not divide the 3 ranks"),
        ({"nnodes": 3, "node_rank": 3, "master_addr": "h"}, "--node-rank 3 must be below"),
        ({"nnodes": 3}, "--nnodes above 1 and --master-addr need each other"),
        ({"master_addr": "host"}, "need each other"),
    ],
)
def test_machines_that_do_not_fit_are_refused(given, said):
    with pytest.raises(SettingsError, match=said):
        EngineSettings.load(model="m", tensor_parallel_size=3, **given)


def test_a_launcher_says_which_rank_this_is():
    assert place_from_launcher({}, 2) is None
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert place_from_launcher(given, 4) == RankPlace(3, 4, 1, 2)
    with pytest.raises(RankError, match=r"WORLD_SIZE is 4, but --tensor-parallel-size .* is 2"):
        place_from_launcher(given, 2)
    with pytest.raises(RankError, match="must be numbers"):
        place_from_launcher(given | {"RANK": "first"}, 4)
    with pytest.raises(RankError, match="RANK is 4, but WORLD_SIZE is 4"):
        place_from_launcher(given | {"RANK": "4"}, 4)
