"""Writes new keys and values to the paged cache: one program per token.

A block's head in a cache of whole numbers (`octavo.kernels.whole_numbers`) has the codes of all its
tokens, and behind them their scales in bfloat16.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import Gpu, describe_gpu
from octavo.kernels.whole_numbers import SCALE_BYTES, part_of, spread

_ELEMENTS = 8  # per thread
_MAX_THREADS = 512


@triton.jit
def stored(x, to, scale, LARGEST: tl.constexpr):
    """Convert `x` to the dtype of the cache that `to` points to."""
    dtype = to.dtype.element_ty
    if x.dtype != dtype:
        x = tl.clamp(x.to(tl.float32) / scale, -LARGEST, LARGEST).to(dtype)
    return x


def largest(cache: Tensor) -> float:
    """Return the largest finite value of a cache's dtype."""
    return torch.finfo(cache.dtype).max


def warps_for(elements: int, gpu: Gpu) -> int:
    """Return the number of warps of a program that copies a number of elements; a power of two.

    Each thread copies at most eight elements, if there are enough threads: they fit its registers
    and one 16-byte load.
    """
    return max(min(elements // _ELEMENTS, _MAX_THREADS) // gpu.warp_size, 1)


@triton.jit
def _write(  # noqa: PLR0917
    x,
    cache,
    token,
    slot,
    scale,
    token_stride,
    head_stride,
    block_stride,
    block_size,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write a token's heads to its slot."""
    element = tl.arange(0, PADDED)
    head = element // DIM
    within = element % DIM
    real = element < HEADS * DIM
    place = slot // block_size * block_stride + (head * block_size + slot % block_size) * DIM
    values = tl.load(x + token * token_stride + head * head_stride + within, mask=real)
    tl.store(cache + place + within, stored(values, cache, scale, LARGEST), mask=real)


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
    key_block_stride,
    value_block_stride,
    block_size,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,  # 0 if there are no values
    PADDED_KEYS: tl.constexpr,  # the next power of two from NUM_KV_HEADS * KEY_DIM
    PADDED_VALUES: tl.constexpr,
    LARGEST: tl.constexpr,  # largest number of the cache's dtype
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        _write(
            key, key_cache, token, slot, key_scale, key_token_stride, key_head_stride,
            key_block_stride, block_size, NUM_KV_HEADS, KEY_DIM, PADDED_KEYS, LARGEST,
        )  # fmt: skip
        if VALUE_DIM > 0:
            _write(
                value, value_cache, token, slot, value_scale, value_token_stride, value_head_stride,
                value_block_stride, block_size, NUM_KV_HEADS, VALUE_DIM, PADDED_VALUES, LARGEST,
            )  # fmt: skip


def write_kv(
    key: Tensor,
    value: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write each token's key and value to its slot; see `octavo.kernels.ops.write_kv`."""
    num_tokens, num_kv_heads, key_dim = key.shape
    if num_tokens == 0:
        return
    if key_cache.dtype == torch.int8:
        assert value is not None, "latents are refused"
        assert value_cache is not None
        _write_codes(spread_heads(key, torch.float32), key_cache, slot_mapping)
        _write_codes(value, value_cache, slot_mapping)
        return
    value_dim = 0
    if value is None or value_cache is None:
        value, value_cache = key, key_cache  # the kernel reads neither: any tensor will do
    else:
        value_dim = value.shape[2]
    key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (key, value))
    padded, padded_values = (
        triton.next_power_of_2(num_kv_heads * dim) for dim in (key_dim, value_dim or key_dim)
    )
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
        value_cache.stride(0),
        key_cache.shape[2],
        NUM_KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PADDED_KEYS=padded,
        PADDED_VALUES=padded_values,
        LARGEST=largest(key_cache),
        num_warps=warps_for(max(padded, padded_values), describe_gpu(key.device)),
    )


@triton.jit
def _write_codes_kernel(  # noqa: PLR0917
    x,
    cache,
    slot_mapping,
    token_stride,
    head_stride,
    block_stride,
    block_size,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # next powers of two
    PADDED_DIM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        head = tl.arange(0, PADDED_HEADS)
        dim = tl.arange(0, PADDED_DIM)[None, :]
        real_head = head < HEADS
        real = real_head[:, None] & (dim < DIM)
        from_x = x + token * token_stride + head[:, None] * head_stride + dim
        values = tl.load(from_x, mask=real, other=0.0).to(tl.float32)
        # Products with zero are NaN where an element is not finite.
        nothing = tl.sum(values * 0.0, 1)
        scale = tl.maximum(tl.max(tl.abs(values), 1) / 127.0, 1.1754943508222875e-38) + nothing
        bits = (scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16  # rounded up
        scale = (bits << 16).to(tl.float32, bitcast=True)
        # Above 2^23, float32 has whole numbers alone: the sum rounds to the nearest, ties to even.
        codes = (tl.div_rn(values, scale[:, None]) + 12582912.0) - 12582912.0
        codes = tl.minimum(tl.maximum(codes, -127.0), 127.0).to(tl.int8)
        to_head = cache + slot // block_size * block_stride
        to_head += head * (block_size * (DIM + SCALE_BYTES))
        offset = slot % block_size
        tl.store(to_head[:, None] + offset * DIM + dim, codes, mask=real)
        to_scale = to_head + block_size * DIM + offset * SCALE_BYTES
        tl.store(to_scale.to(tl.pointer_type(tl.int16)), bits.to(tl.int16), mask=real_head)


def _write_codes(x: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """Write keys, which are spread already, or values `[num_tokens, num_kv_heads, dim]`."""
    num_tokens, num_heads, dim = x.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    heads, padded = map(triton.next_power_of_2, (num_heads, dim))
    _write_codes_kernel[(num_tokens,)](
        x,
        cache,
        slot_mapping,
        x.stride(0),
        x.stride(1),
        cache.stride(0),
        cache.shape[2],
        HEADS=num_heads,
        DIM=dim,
        SCALE_BYTES=SCALE_BYTES,
        PADDED_HEADS=heads,
        PADDED_DIM=padded,
        num_warps=warps_for(heads * padded, describe_gpu(x.device)),
    )


def spread_heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `octavo.kernels.whole_numbers.spread` of heads by one product, in a dtype."""
    part = part_of(x.shape[-1])
    matrix = _matrix(part, dtype, x.device)
    parts = x.to(dtype).reshape(*x.shape[:-1], -1, part)
    return (parts @ matrix).reshape(x.shape)


@cache
def _matrix(part: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return spread(torch.eye(part)).to(dtype).to(device)
