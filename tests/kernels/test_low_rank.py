"""Low-rank products on a CPU, in C++ and in plain PyTorch, against their definition."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.kernels import cpu, low_rank, ops
from octavo.kernels.low_rank import RECORD, TILE_ROWS, LowRankBatch, sort_rows
from tests.kernels.low_rank_batches import check_low_rank

CASES = {
    "inputs": st.integers(1, 70),
    "outputs": st.integers(1, 70),
    "ranks": st.lists(st.integers(0, 21) | st.just(256), min_size=1, max_size=5),
    "num_rows": st.integers(1, 90),
    "dtype": st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    "wide": st.booleans(),
    "seed": st.integers(0, 999),
}


@pytest.mark.parametrize("kernels", [cpu, low_rank], ids=["native", "pytorch"])
@given(**CASES)
@example(
    inputs=576,
    outputs=1536,
    ranks=[64, 0, 3],
    num_rows=40,
    dtype=torch.bfloat16,
    wide=False,
    seed=0,
)
@settings(deadline=None, max_examples=40)
def test_low_rank(kernels, **case):
    check_low_rank(kernels, **case)


def test_rows_are_sorted_into_tiles_of_one_adapter():
    adapters = np.array([1, -1, 0] * (TILE_ROWS + 2) + [1])
    batch = sort_rows(adapters, torch.zeros((1, 2, 4), dtype=torch.int64), 8, [])
    seen = [
        (adapter, int(row))
        for adapter, begin, end in batch.tiles.tolist()
        for row in batch.rows[begin:end]
    ]
    assert sorted(seen) == sorted((a, row) for row, a in enumerate(adapters) if a >= 0)
    assert all(end - begin <= TILE_ROWS for _, begin, end in batch.tiles.tolist())


def test_rows_that_do_not_fit_are_refused():
    batch = sort_rows(np.array([0, 0]), torch.zeros((1, 1, 4), dtype=torch.int64), 8, [])
    with pytest.raises(ValueError, match="adapters are for 2 rows, but the layer has 3"):
        ops.add_low_rank(torch.zeros(3, 4), torch.zeros(3, 4), batch, 0)
    with pytest.raises(ValueError, match="rows must be contiguous"):
        ops.add_low_rank(torch.zeros(4, 2).t(), torch.zeros(2, 4), batch, 0)


@given(
    num_rows=st.integers(1, 100),
    numbers=st.lists(st.integers(-1, 7), min_size=1, max_size=100),
    before=st.lists(st.integers(-1, 7), min_size=1, max_size=100),
)
def test_a_batch_with_room_takes_any_rows(num_rows, numbers, before):
    records = torch.zeros((1, 9, RECORD), dtype=torch.int64)
    room = LowRankBatch.with_room(num_rows, records, 64)
    batches = [
        sort_rows(np.array(rows[:num_rows]), records[:, :8], 64, ()) for rows in (before, numbers)
    ]
    for batch in batches:  # nothing of the first is left
        room.take(batch)
        tiles = room.tiles.tolist()
        assert tiles[: len(batch.tiles)] == batch.tiles.tolist()
        assert all(tile == [8, 0, 0] for tile in tiles[len(batch.tiles) :])
        assert room.rows[: len(batch.rows)].tolist() == batch.rows.tolist()
