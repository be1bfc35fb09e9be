"""Ranks' positions, and messages from rank 0."""

import numpy as np
import pytest

from octavo.common.topology import Core, Node
from octavo.engine.execution.inputs import StepArrays
from octavo.engine.execution.leader import pack, unpack
from octavo.engine.parallel.place import RankError, RankPlace, place_from_launcher


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
    found = unpack(pack(arrays))
    for name in ("laid", "query_starts", "query_lens", "seq_lens", "rows"):
        sent, got = getattr(arrays, name), getattr(found, name)
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype
    for sent, got in zip(arrays.tables, found.tables, strict=True):
        np.testing.assert_array_equal(got, sent)
        assert got.dtype == sent.dtype


def test_ranks_of_a_machine_divide_its_cores():
    nodes = tuple(Node(n, tuple(Core((4 * n + i,)) for i in range(4))) for n in range(2))
    shares = [RankPlace(rank, 3, rank, 3).share_of(nodes) for rank in range(3)]
    cpus = [[core.cpus[0] for node in share for core in node.cores] for share in shares]
    assert sorted(cpu for own in cpus for cpu in own) == list(range(8))
    assert {len(own) for own in cpus} == {2, 3}
    few = [RankPlace(rank, 9, rank, 9).share_of(nodes) for rank in range(9)]
    assert all(len(share) == len(share[0].cores) == 1 for share in few)
    assert RankPlace(1, 2, 1, 2).share_of((Node(0, (Core((0,)),)),))[0].cores == (Core((0,)),)


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
