"""Hints change no contents, and accept any weights."""

import mmap

import psutil
import pytest
import torch

from octavo.kernels import huge_pages


def test_weights_of_any_kind_are_as_before():
    plain, packed = torch.rand(1 << 20), torch.rand(64, 64)
    before = plain.clone()
    opaque = packed.to_mkldnn()
    huge_pages.collapse([plain, opaque])
    huge_pages.collapse([opaque])
    huge_pages.collapse([])
    assert torch.equal(plain, before)
    assert torch.equal(opaque.to_dense(), packed)


def test_small_tensors_are_gathered_with_their_values():
    large, opaque = torch.rand(4 << 20), torch.rand(64, 64).to_mkldnn()
    small = [torch.rand(n, 3) for n in (1, 5, 700)]
    part, tied, as_bytes = torch.rand(100)[:50], small[1].view(15), small[2].view(torch.uint8)
    huge_pages.gather([torch.empty(3, device="meta")])
    weights = [*small, part, large, tied, as_bytes, torch.empty(0), opaque]
    values, addresses = [one.to_dense().clone() for one in weights], large.data_ptr()
    huge_pages.gather(weights)
    assert all(torch.equal(new.to_dense(), old) for new, old in zip(weights, values, strict=True))
    first, second, third = (one.data_ptr() for one in small)
    assert (second - first, third - second) == (64, 64)
    assert tied.data_ptr() == second
    assert large.data_ptr() == addresses


def test_a_tensor_is_backed_by_memory_without_a_change():
    # A separate mapping: malloc might return heap memory, which is backed already.
    pages = mmap.mmap(-1, 96 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if not taken(pages, huge_pages._POPULATE_WRITE):
        pytest.skip("this Linux does not find memory on demand")
    rows = torch.frombuffer(pages, dtype=torch.uint8)
    rows[5_000_000] = 7
    before = resident()
    for _ in huge_pages.populate(rows):
        pass
    assert resident() - before > 80 << 20
    assert rows[5_000_000] == 7
    assert not rows[:5_000_000].any()


def taken(pages: mmap.mmap, advice: int) -> bool:
    try:
        pages.madvise(advice, 0, mmap.PAGESIZE)
    except OSError:
        return False
    return True


def resident() -> int:
    return psutil.Process().memory_info().rss
