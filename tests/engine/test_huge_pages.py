"""Hints that change no content, and that any weights may be given to."""

import psutil
import torch

from engine.executor import huge_pages


def test_weights_of_any_kind_are_as_before():
    plain, packed = torch.rand(1 << 20), torch.rand(64, 64)
    before = plain.clone()
    opaque = packed.to_mkldnn()
    huge_pages.collapse([plain, opaque])
    huge_pages.collapse([opaque])
    huge_pages.collapse([])
    assert torch.equal(plain, before)
    assert torch.equal(opaque.to_dense(), packed)


def test_a_tensor_is_backed_by_memory_without_a_change():
    rows = torch.empty(96 << 20, dtype=torch.uint8)  # more than malloc keeps for reuse
    rows[5_000_000] = 7
    before = resident()
    for _ in huge_pages.populate(rows):
        pass
    assert resident() - before > 80 << 20
    assert rows[5_000_000] == 7


def resident() -> int:
    return psutil.Process().memory_info().rss
