"""The number of pieces of long sequences, and the room for them in CUDA graphs' plans."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels.gpu import Gpu
from octavo.kernels.metadata import AttentionShape
from octavo.kernels.triton import plan, splits
from octavo.kernels.triton.splits import MAX_SPLITS, MIN_KEYS, choose_splits
from octavo.kernels.triton.tiles import Heads, choose_tiles

H100 = 2 * 132  # concurrent programs, of decodes


@pytest.mark.parametrize("programs", [1, 8, 32, 128, 264, 512, 2048])
@pytest.mark.parametrize("longest", [0, 1, 255, 2048, 32768, 131072])
def test_pieces_are_worth_their_while(programs, longest):
    pieces = choose_splits(programs, longest, H100)
    assert 1 <= pieces <= MAX_SPLITS
    assert pieces == 1 or longest / pieces >= MIN_KEYS


@pytest.mark.parametrize("programs", [4, 8, 32, 100, 128, 265, 400])
def test_long_sequences_keep_the_whole_gpu_busy(programs):
    run = programs * choose_splits(programs, 32768, H100)
    assert run >= 0.85 * -(-run // H100) * H100


@pytest.mark.parametrize("programs", [264, 512, 2048])
def test_enough_sequences_are_not_cut(programs):
    assert choose_splits(programs, 2048, H100) == 1


def test_what_fills_the_gpu_by_itself_is_not_cut():
    # Each prompt chunk has its own multiprocessor: two pieces of one would run in sequence.
    assert choose_splits(132, 32768, 132) == 1
    assert choose_splits(132, 32768, 264) == 2


def test_a_growing_sequence_adds_no_answer_per_token():
    splits._cheapest.cache_clear()
    for longest in range(100_000):
        choose_splits(8, longest, H100)
    kept = splits._cheapest.cache_info()
    assert kept.currsize == -(-100_000 // MIN_KEYS)
    assert kept.maxsize is not None


SEQUENCES, CHUNKS, ROWS = 40, 10, 300


@pytest.mark.parametrize("group", [1, 4, 20])
@pytest.mark.parametrize("kv_heads", [1, 8])
def test_a_plan_with_room_has_room_for_any_batch(monkeypatch, group, kv_heads):
    gpu = Gpu("H100", "sm_90", 32, 227 << 10, 132)
    monkeypatch.setattr(plan, "describe_gpu", lambda _: gpu)
    dtypes = {"dtype": torch.bfloat16, "cache_dtype": torch.bfloat16}
    shape = {"num_heads": group * kv_heads, "num_kv_heads": kv_heads, "key_dim": 128}
    layers = AttentionShape(**shape, value_dim=128, **dtypes, device=torch.device("cpu"))
    tile_rows = choose_tiles("chunk", gpu, Heads(group, 128, 128), **dtypes).rows
    room = plan.plan_room(SEQUENCES, CHUNKS, ROWS, layers)
    rng, cut = np.random.default_rng(0), set()
    for _ in range(100):
        chunks, decodes = rng.integers(0, CHUNKS + 1), rng.integers(0, SEQUENCES - CHUNKS + 1)
        left = ROWS - decodes - 2 * chunks
        shares = rng.multinomial(rng.integers(0, left + 1), [1 / (chunks + 1)] * (chunks + 1))
        queries = np.append(shares[:chunks] + 2, np.ones(decodes, np.int64))
        given = plan.plan_attention(queries, rng.integers(1, 1 << 15, len(queries)), layers)
        cut |= {given.num_decode_pieces > 0, given.num_chunk_pieces > 0}
        others = len(given.items) - given.num_decode_items
        rest = len(room.items) - room.num_decode_items - others
        assert given.num_decode_items <= room.num_decode_items
        assert given.num_decode_pieces <= room.num_decode_pieces
        assert given.num_chunk_pieces <= room.num_chunk_pieces
        assert rest * tile_rows >= (ROWS - queries.sum()) * group
    assert cut == {False, True}
