"""Writes new keys and values to the paged cache: one program per token."""

# Triton compiles its kernels' source, where types are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import Gpu, describe_gpu

_ELEMENTS = 8  # per thread
_MAX_THREADS = 512


@triton.jit
def stored(x, to, scale, LARGEST: tl.constexpr):
    """Return `x` in the dtype of the cache that `to` points to."""
    dtype = to.dtype.element_ty
    if x.dtype != dtype:
        x = tl.clamp(x.to(tl.float32) / scale, -LARGEST, LARGEST).to(dtype)
    return x


def largest(cache: Tensor) -> float:
    """Return the largest number of a cache's dtype."""
    return torch.finfo(cache.dtype).max


def warps_for(elements: int, gpu: Gpu) -> int:
    """Return the warps of a program that copies a number of elements, a power of two.

    Each thread copies at most eight, if there are enough threads: they fit its registers and one
    load of 16 bytes.
    """
    return max(min(elements // _ELEMENTS, _MAX_THREADS) // gpu.warp_size, 1)


@triton.jit
def _write_kv_kernel(  # noqa: PLR0917
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    block_size,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED: tl.constexpr,  # the next power of two to NUM_KV_HEADS * HEAD_DIM
    LARGEST: tl.constexpr,  # largest number of the cache's dtype
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        block = slot // block_size
        offset = slot % block_size
        element = tl.arange(0, PADDED)
        head = element // HEAD_DIM
        within = element % HEAD_DIM
        real = element < NUM_KV_HEADS * HEAD_DIM
        place = block * block_stride + (head * block_size + offset) * HEAD_DIM + within
        from_key = key + token * key_token_stride + head * key_head_stride + within
        from_value = value + token * value_token_stride + head * value_head_stride + within
        k = stored(tl.load(from_key, mask=real), key_cache, key_scale, LARGEST)
        v = stored(tl.load(from_value, mask=real), value_cache, value_scale, LARGEST)
        tl.store(key_cache + place, k, mask=real)
        tl.store(value_cache + place, v, mask=real)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write each token's key and value to its slot; see `octavo.kernels.ops.write_kv`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    padded = triton.next_power_of_2(num_kv_heads * head_dim)
    _write_kv_kernel[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale,
        value_scale,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.shape[2],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED=padded,
        LARGEST=largest(key_cache),
        num_warps=warps_for(padded, describe_gpu(key.device)),
    )
