"""Swap space is pinned without rounding its size, until its cache is freed."""

import gc

import pytest
import torch

from octavo.engine.memory.cache_layout import plan_layout
from octavo.engine.memory.cache_tensors import CacheTensors
from tests.engine.memory.test_swap import SHAPE

BLOCK_BYTES = 2 * 2 * 2 * 16 * 32 * 2  # layers, K and V, heads, tokens, head_dim, bytes


class Runtime:
    """A fake CUDA runtime that records calls in order."""

    def __init__(self):
        self.calls = []
        self.code = 0

    def cudaHostRegister(self, address, size, flags):  # noqa: N802 - CUDA's name
        self.calls.append(("register", address, size))
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802 - CUDA's name
        self.calls.append(("unregister", address))
        return 0


@pytest.fixture
def runtime(monkeypatch):
    """A fake GPU in the host's memory."""
    runtime, empty = Runtime(), torch.empty

    def empty_here(*shape, device=None, pin_memory=False, **given):
        assert not pin_memory, "PyTorch rounds what it pins up to a power of two"
        return empty(*shape, **given)

    monkeypatch.setattr(torch, "empty", empty_here)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.calls.append(("wait",)))
    return runtime


def tensors(num_swap_blocks):
    return CacheTensors(
        plan_layout(SHAPE, 16, torch.bfloat16, torch.bfloat16),
        num_blocks=4,
        num_swap_blocks=num_swap_blocks,
        dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )


def test_all_of_it_and_no_more_is_pinned_and_let_go_once_no_copy_runs(runtime):
    cache = tensors(5)
    address = cache.swap.data_ptr()
    assert runtime.calls == [("register", address, 5 * BLOCK_BYTES)]
    del cache
    gc.collect()
    assert runtime.calls[1:] == [("wait",), ("unregister", address)]


def test_no_swap_space_pins_nothing(runtime):
    tensors(0)
    assert runtime.calls == []


def test_what_cannot_be_pinned_is_refused_with_what_to_change(runtime):
    runtime.code = 2
    with pytest.raises(OSError, match=r"cannot pin .* lower --swap-space"):
        tensors(5)
    gc.collect()
    assert len(runtime.calls) == 1
