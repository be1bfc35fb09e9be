"""The operations of the kernels, their limits and their backends."""

import numpy as np
import pytest
import torch

from octavo.kernels import BACKENDS, ops
from octavo.kernels.backend import Backend, find_backend
from octavo.kernels.logits import mask_logits

SUPPORTED = {
    "num_heads": 9,
    "num_kv_heads": 3,
    "key_dim": 64,
    "value_dim": 64,
    "block_size": 16,
    "dtype": torch.bfloat16,
    "device": "cpu",
}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"block_size": 8},
        {"block_size": 256},
        {"key_dim": 8, "value_dim": 8},
        {"key_dim": 80},
        {"key_dim": 576, "value_dim": 512},
        {"num_heads": 3},
        {"dtype": torch.float32, "device": torch.device("cuda", 0)},
    ],
)
def test_supported(change):
    ops.check_supported(**(SUPPORTED | change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 4}, "block size 4"),
        ({"block_size": 24}, "block size 24"),
        ({"block_size": 512}, "block size 512"),
        ({"key_dim": 0}, "key size 0"),
        ({"key_dim": 584}, "key size 584 .* from 8 to 576"),
        ({"value_dim": 520}, "value size 520 .* from 8 to 512"),
        ({"key_dim": 65}, "key size 65"),
        ({"num_kv_heads": 2}, "9 query heads cannot be shared evenly by 2"),
        ({"num_kv_heads": 0}, "by 0 KV heads"),
        ({"dtype": torch.float64}, "float64"),
        ({"device": "meta"}, "'meta'"),
    ],
)
def test_unsupported(change, message):
    with pytest.raises(ValueError, match=message):
        ops.check_supported(**(SUPPORTED | change))


@pytest.mark.parametrize("device_type", BACKENDS)
def test_a_registered_backend_has_every_operation(device_type):
    if device_type == "cuda":
        pytest.importorskip("triton")
    assert isinstance(find_backend(device_type), Backend)


def test_copies_of_blocks_that_do_not_exist():
    cache = torch.zeros(4, 1, 2, 1, 8, 32)
    space = torch.zeros(2, 1, 2, 1, 8, 32)
    with pytest.raises(IndexError, match=r"source block is out of range \[0, 4\)"):
        ops.copy_blocks(cache, torch.tensor([[4, 0]]))
    with pytest.raises(IndexError, match=r"destination block is out of range \[0, 2\)"):
        ops.swap_blocks(cache, space, torch.tensor([[1, 1], [3, 2]]))
    with pytest.raises(IndexError, match="source block"):
        ops.swap_blocks(space, cache, torch.tensor([[-1, 1]]))


def test_masks_that_do_not_fit():
    logits, masks = torch.zeros(2, 40), np.zeros((1, 2), np.int32)
    with pytest.raises(IndexError, match=r"a row is out of range \[0, 2\): \[2\]"):
        mask_logits(logits, [2], masks)
    for rows, wrong in (([0, 1], masks), ([0], masks.astype(np.int64))):
        with pytest.raises(ValueError, match="rows need as many masks of int32"):
            mask_logits(logits, rows, wrong)
    mask_logits(logits, [], masks[:0])
    assert not logits.any()


def test_no_pairs_is_nothing_to_do():
    cache = torch.ones(2, 1, 2, 1, 8, 32)
    none = torch.empty((0, 2), dtype=torch.int64)
    ops.copy_blocks(cache, none)
    ops.swap_blocks(cache, cache.clone(), none)
    assert cache.all()


def test_what_paged_attention_cannot_do_is_refused(harness):
    batch = harness.build(harness.case(lengths=[(1, 5)]))
    given = (batch.query, batch.key_cache, batch.value_cache, batch.metadata)
    with pytest.raises(ValueError, match=r"either a window \(4\) or chunks \(8\)"):
        ops.paged_attention(*given, scale=1.0, sliding_window=4, chunk=8)
    with pytest.raises(ValueError, match="value_dim is 16 and values have 32"):
        ops.paged_attention(*given, scale=1.0, value_dim=16)
    for width in (None, 0, 12, 40):
        with pytest.raises(ValueError, match=f"value_dim is {width}: .* at most the 32"):
            ops.paged_attention(*given[:2], None, given[3], scale=1.0, value_dim=width)


def test_operations_find_their_backend(harness):
    harness.check_attention(
        ops, harness.case(lengths=[(1, 20), (7, 7)], num_kv_heads=3, group=3, head_dim=64)
    )
    harness.check_write(ops, harness.case(lengths=[(20, 20)]))
    harness.check_copies(ops, harness.case(lengths=[(20, 20)]))
