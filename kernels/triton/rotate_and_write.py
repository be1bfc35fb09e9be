"""Rotates queries and keys (RoPE) and writes keys and values into the paged cache.

The rotary embedding (RoFormer, Su et al. 2021) pairs element i of a head with element i +
key_dim / 2. One program per token reads and writes everything once; three kernels would do so
repeatedly.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import describe_gpu
from octavo.kernels.triton.write_kv import largest, stored, warps_for, write_kv


@triton.jit
def _halves(  # noqa: PLR0917
    x, token, token_stride, head_stride, head, pair, real, HALF: tl.constexpr
):
    """Load both halves of a token's heads."""
    place = x + token * token_stride + head[:, None] * head_stride + pair[None, :]
    return tl.load(place, mask=real, other=0.0), tl.load(place + HALF, mask=real, other=0.0)


@triton.jit
def _rotated(low, high, c, s):
    """Return rotated halves of heads, rounded to their dtype."""
    dtype: tl.constexpr = low.dtype
    low, high = low.to(tl.float32), high.to(tl.float32)
    return (low * c - high * s).to(dtype), (high * c + low * s).to(dtype)


@triton.jit
def _store(  # noqa: PLR0917
    low, high, cache, place, scale, real, HALF: tl.constexpr, LARGEST: tl.constexpr
):
    """Write halves of heads to a cache."""
    tl.store(cache + place, stored(low, cache, scale, LARGEST), mask=real)
    tl.store(cache + place + HALF, stored(high, cache, scale, LARGEST), mask=real)


@triton.jit
def _rotate_and_write_kernel(  # noqa: PLR0917
    query,
    key,
    value,
    cos,
    sin,
    out,
    key_cache,
    value_cache,
    slot_mapping,
    key_scale,
    value_scale,
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    angle_stride,
    key_block_stride,
    value_block_stride,
    block_size,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # next powers of two
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,  # half of a key
    PADDED_VALUE_HALF: tl.constexpr,
    LARGEST: tl.constexpr,  # largest number of the cache's dtype
):
    half: tl.constexpr = KEY_DIM // 2
    value_half: tl.constexpr = VALUE_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PADDED_HALF)
    real_pair = pair < half
    angle = token * angle_stride + pair
    c = tl.load(cos + angle, mask=real_pair, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=real_pair, other=0.0).to(tl.float32)[None, :]

    head = tl.arange(0, PADDED_HEADS)
    real = (head < NUM_HEADS)[:, None] & real_pair[None, :]
    low, high = _halves(query, token, query_token_stride, query_head_stride, head, pair, real, half)
    low, high = _rotated(low, high, c, s)
    to = out + (token * NUM_HEADS + head[:, None]) * KEY_DIM + pair[None, :]
    tl.store(to, low, mask=real)
    tl.store(to + half, high, mask=real)

    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        kv_head = tl.arange(0, PADDED_KV_HEADS)
        real_head = (kv_head < NUM_KV_HEADS)[:, None]
        real_key = real_head & real_pair[None, :]
        block = slot // block_size
        row = kv_head[:, None] * block_size + slot % block_size
        place = block * key_block_stride + row * KEY_DIM + pair[None, :]
        k_low, k_high = _halves(
            key, token, key_token_stride, key_head_stride, kv_head, pair, real_key, half
        )
        k_low, k_high = _rotated(k_low, k_high, c, s)
        _store(k_low, k_high, key_cache, place, key_scale, real_key, half, LARGEST)
        within = tl.arange(0, PADDED_VALUE_HALF)
        real_value = real_head & (within < value_half)[None, :]
        place = block * value_block_stride + row * VALUE_DIM + within[None, :]
        v_low, v_high = _halves(
            value, token, value_token_stride, value_head_stride,
            kv_head, within, real_value, value_half,
        )  # fmt: skip
        _store(v_low, v_high, value_cache, place, value_scale, real_value, value_half, LARGEST)


def rotate_and_write(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Rotate queries and keys, write keys and values; see `octavo.kernels.ops`."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    num_tokens, num_heads, key_dim = query.shape
    _, num_kv_heads, value_dim = value.shape
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
    if key_cache.dtype == torch.int8:  # a token's keys are rotated in a block of their own
        keys, values = (x.new_empty(num_tokens, num_kv_heads, 1, x.shape[2]) for x in (key, value))
        slots = torch.arange(num_tokens, device=query.device)
        out = rotate_and_write(query, key, value, cos, sin, keys, values, slots)
        write_kv(keys[:, :, 0], value, key_cache, value_cache, slot_mapping)
        return out
    padded_heads, padded_half = map(triton.next_power_of_2, (num_heads, key_dim // 2))
    _rotate_and_write_kernel[(num_tokens,)](
        query,
        key,
        value,
        cos,
        sin,
        out,
        key_cache,
        value_cache,
        slot_mapping,
        key_scale,
        value_scale,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cos.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        key_cache.shape[2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        PADDED_HEADS=padded_heads,
        PADDED_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        PADDED_HALF=padded_half,
        PADDED_VALUE_HALF=triton.next_power_of_2(value_dim // 2),
        LARGEST=largest(key_cache),
        num_warps=warps_for(padded_heads * padded_half, describe_gpu(query.device)),
        enable_fp_fusion=True,
    )
    return out
