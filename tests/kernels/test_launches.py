"""The numbers of programs and warps of the kernels' launches; nothing is launched.

A GPU refuses grids that are too large, but the interpreter does not.
"""

import importlib
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from octavo.kernels import triton as kernels
from octavo.kernels.gpu import Gpu
from octavo.kernels.metadata import AttentionMetadata
from octavo.kernels.sampling_tensors import SamplingTensors

LARGEST_GRID = (2**31 - 1, 65_535, 65_535)
KERNELS = {
    "copy_blocks": ("_swap_blocks_kernel",),
    "draw_tokens": ("_draw_tokens_kernel",),
    "paged_attention": ("paged_attention_kernel", "merge_splits"),
    "rotate_and_write": ("_rotate_and_write_kernel",),
    "write_kv": ("_write_kv_kernel",),
}


class Kernel:
    """A fake kernel that records its launches."""

    def __init__(self, launches):
        self.launches = launches

    def __getitem__(self, grid):
        def launch(*_, **options):
            self.launches.append((grid, options))

        return launch


@pytest.fixture
def launches(monkeypatch):
    """The (grid, keyword arguments) of each launch."""
    found = []
    for module, names in KERNELS.items():
        for name in names:
            path = importlib.import_module(f"octavo.kernels.triton.{module}")
            monkeypatch.setattr(path, name, Kernel(found))
    return found


def grids(launches):
    assert launches
    for grid, _ in launches:
        assert all(0 < size <= most for size, most in zip(grid, LARGEST_GRID, strict=False)), grid
    return [grid for grid, _ in launches]


@pytest.mark.parametrize(("words", "programs"), [(1000, 1), (5000, 5), (80_000_000, 65_535)])
def test_a_block_of_any_size_is_copied(launches, words, programs):
    # Untouched memory is not allocated.
    cache = torch.empty((2, words), dtype=torch.float32)
    kernels.copy_blocks(cache, torch.tensor([[0, 1]] * 3))
    assert grids(launches) == [(3, programs)]


def test_many_tokens_sequences_and_rows_fit_into_a_grid(launches):
    tokens, heads, dim = 100_000, 2, 32
    key = torch.empty((tokens, heads, dim))
    angles = torch.empty((tokens, dim))
    caches = torch.empty((1, heads, 16, dim)), torch.empty((1, heads, 16, dim))
    slots = torch.empty(tokens, dtype=torch.int64)
    kernels.write_kv(key, key, *caches, slots)
    kernels.rotate_and_write(key, key, key, angles, angles, *caches, slots)
    metadata = AttentionMetadata(
        query_starts=torch.arange(tokens + 1, dtype=torch.int32),
        seq_lens=torch.ones(tokens, dtype=torch.int32),
        block_tables=torch.zeros((tokens, 1), dtype=torch.int32),
        slot_mapping=slots,
        max_query_len=1,
        max_seq_len=1,
    )
    kernels.paged_attention(key, *caches, metadata, scale=1.0)
    logits = torch.empty((tokens, 8))
    kernels.draw_tokens(
        logits, SamplingTensors.greedy(tokens)._replace(temperatures=np.ones(tokens))
    )
    assert [grid[0] for grid in grids(launches)] == [tokens] * 4


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotating", "writing"),
    [(3, 64, 1, 1), (9, 64, 2, 4), (32, 128, 8, 16), (64, 128, 16, 16), (128, 128, 16, 16)],
)
def test_warps_grow_with_what_they_move(launches, heads, head_dim, rotating, writing):
    key = torch.empty((1, heads, head_dim), dtype=torch.bfloat16)
    cache = torch.empty((1, heads, 16, head_dim), dtype=torch.bfloat16)
    angles, slots = key[0, :1], torch.zeros(1, dtype=torch.int64)
    kernels.rotate_and_write(key, key, key, angles, angles, cache, cache, slots)
    kernels.write_kv(key, key, cache, cache, slots)
    assert [options["num_warps"] for _, options in launches] == [rotating, writing]
    assert all(math.log2(options["num_warps"]).is_integer() for _, options in launches)


def test_warps_of_64_threads_are_fewer(launches, monkeypatch):
    gpu = Gpu("MI300X", "gfx942", 64, 65_536, 304)
    for module in ("draw_tokens", "rotate_and_write", "write_kv"):
        path = importlib.import_module(f"octavo.kernels.triton.{module}")
        monkeypatch.setattr(path, "describe_gpu", lambda _: gpu)
    key = torch.empty((1, 128, 128), dtype=torch.bfloat16)
    cache = torch.empty((1, 128, 16, 128), dtype=torch.bfloat16)
    angles, slots = key[0, :1], torch.zeros(1, dtype=torch.int64)
    kernels.rotate_and_write(key, key, key, angles, angles, cache, cache, slots)
    kernels.write_kv(key, key, cache, cache, slots)
    sampling = SamplingTensors.greedy(1)._replace(temperatures=np.ones(1))
    kernels.draw_tokens(torch.empty((1, 8)), sampling)
    assert [options["num_warps"] for _, options in launches] == [8, 8, 16]
