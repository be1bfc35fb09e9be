"""The number of pieces of long sequences, and the room for them in CUDA graphs' plans."""

import heapq

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
LENGTHS = [MIN_KEYS << i for i in range(10)]
"""Lengths of pieces that are tried."""


def pieces_of(programs, longest, concurrent):
    """Return the number of pieces of each of some sequences of one length, with one KV head."""
    (pieces,) = set(choose_splits(np.full(programs, longest), 1, concurrent).tolist())
    return pieces


@pytest.mark.parametrize("programs", [1, 8, 32, 128, 264, 512, 2048])
@pytest.mark.parametrize("longest", [0, 1, 255, 2048, 32768, 131072])
def test_pieces_are_worth_their_while(programs, longest):
    pieces = pieces_of(programs, longest, H100)
    assert 1 <= pieces <= MAX_SPLITS
    assert pieces == 1 or longest / pieces >= MIN_KEYS


@pytest.mark.parametrize("programs", [4, 8, 32, 100, 128, 265, 400])
def test_long_sequences_keep_the_whole_gpu_busy(programs):
    run = programs * pieces_of(programs, 32768, H100)
    assert run >= 0.85 * -(-run // H100) * H100


@pytest.mark.parametrize("programs", [264, 512, 2048])
def test_enough_sequences_are_not_cut(programs):
    assert pieces_of(programs, 2048, H100) == 1


def test_what_fills_the_gpu_by_itself_is_not_cut():
    # Each prompt chunk has its own multiprocessor: two pieces of one would run in sequence.
    assert pieces_of(132, 32768, 132) == 1
    assert pieces_of(132, 32768, 264) == 2


def test_a_growing_sequence_adds_no_answer_per_token():
    splits._cheapest.cache_clear()
    for longest in range(0, 100_000, 64):
        pieces_of(8, longest, H100)
    kept = splits._cheapest.cache_info()
    assert kept.currsize == -(-100_000 // MIN_KEYS)
    assert kept.maxsize is not None


def test_a_long_sequence_beside_short_ones_has_its_own_number_of_pieces():
    lengths = np.full(128, 1000)
    lengths[17] = 100_000
    pieces = choose_splits(lengths, 8, H100)
    assert set(np.delete(pieces, 17)) == {1}
    # Each piece is shorter than the mean number of keys of a concurrent program.
    assert lengths.max() / pieces[17] < lengths.sum() * 8 / H100


@pytest.mark.parametrize("seed", range(20))
def test_any_lengths_are_cut_to_fill_the_gpu_within_the_room(seed):
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([1, 2, 8, 32]))
    lengths = (2 ** rng.uniform(0, 17, rng.integers(1, 300))).astype(int)
    pieces = choose_splits(lengths, heads, H100)
    assert (pieces[lengths < 2 * MIN_KEYS] == 1).all()
    assert (lengths / pieces >= MIN_KEYS)[pieces > 1].all()
    assert pieces.max() <= MAX_SPLITS
    assert pieces.sum() <= max(len(lengths), splits.max_pieces("decode", heads, H100))
    order = np.argsort(lengths, kind="stable")
    assert (np.diff(pieces[order]) >= 0).all()

    def time(counts):
        """Each program begins when one of those that run ends, the longest first."""
        programs = np.repeat(-(-lengths // counts), counts * heads) + splits.START_KEYS
        running = [0] * H100
        for keys in sorted(programs.tolist(), reverse=True):
            heapq.heapreplace(running, running[0] + keys)
        return max(running)

    best = min(time(np.minimum(np.maximum(lengths // length, 1), MAX_SPLITS)) for length in LENGTHS)
    uncut = time(np.ones_like(lengths))
    assert time(pieces) <= min(1.01 * uncut, 1.1 * best)


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


def test_pieces_are_adjacent_and_come_first(monkeypatch):
    gpu = Gpu("H100", "sm_90", 32, 227 << 10, 132)
    monkeypatch.setattr(plan, "describe_gpu", lambda _: gpu)
    layers = AttentionShape(32, 8, 128, 128, torch.bfloat16, torch.bfloat16, torch.device("cpu"))
    tokens = np.full(128, 1000)
    tokens[17] = 100_000
    found = plan.plan_attention(np.ones(128, np.int32), tokens, layers)
    cut = found.num_decode_pieces
    assert cut == found.most_pieces > 30
    expected = [[17, 0, piece, cut] for piece in range(cut)]
    assert found.items[:cut].tolist() == expected
    assert found.items[cut:].tolist() == [[i, 0, 0, 1] for i in range(128) if i != 17]
    assert found.num_decode_items == len(found.items)
