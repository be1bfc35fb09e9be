"""Rotates queries and keys (RoPE) and writes keys and values into the paged cache.

Rotary position embedding (RoFormer, Su et al. 2021) of the kind that pairs element i
of a head with element i + head_dim / 2. One program a token: what three kernels
would read and write again passes through registers once.
"""

# Triton reads its kernels' source: types there are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.write_kv import largest, stored


@triton.jit
def _rotated(  # noqa: PLR0917
    x, token, token_stride, head_stride, c, s, head, pair, real, HALF: tl.constexpr
):
    """Both halves of a token's heads, rotated, in float32."""
    place = x + token * token_stride + head[:, None] * head_stride + pair[None, :]
    low = tl.load(place, mask=real, other=0.0).to(tl.float32)
    high = tl.load(place + HALF, mask=real, other=0.0).to(tl.float32)
    return low * c - high * s, high * c + low * s


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
    block_stride,
    block_size,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEADS: tl.constexpr,  # next powers of two
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    LARGEST: tl.constexpr,  # number of the cache's dtype
):
    half: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PADDED_HALF)
    real_pair = pair < half
    angle = token * angle_stride + pair
    c = tl.load(cos + angle, mask=real_pair, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=real_pair, other=0.0).to(tl.float32)[None, :]

    head = tl.arange(0, PADDED_HEADS)
    real = (head < NUM_HEADS)[:, None] & real_pair[None, :]
    low, high = _rotated(
        query, token, query_token_stride, query_head_stride, c, s, head, pair, real, half
    )
    to = out + (token * NUM_HEADS + head[:, None]) * HEAD_DIM + pair[None, :]
    tl.store(to, low.to(out.dtype.element_ty), mask=real)
    tl.store(to + half, high.to(out.dtype.element_ty), mask=real)

    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        kv_head = tl.arange(0, PADDED_KV_HEADS)
        real_kv = (kv_head < NUM_KV_HEADS)[:, None] & real_pair[None, :]
        k_low, k_high = _rotated(
            key, token, key_token_stride, key_head_stride, c, s, kv_head, pair, real_kv, half
        )
        # Rounded to the model's type first, as if it had been written between.
        dtype: tl.constexpr = key.dtype.element_ty
        place = slot // block_size * block_stride + pair[None, :]
        place += (kv_head[:, None] * block_size + slot % block_size) * HEAD_DIM
        to_key = key_cache + place
        tl.store(to_key, stored(k_low.to(dtype), key_cache, key_scale, LARGEST), mask=real_kv)
        stored_high = stored(k_high.to(dtype), key_cache, key_scale, LARGEST)
        tl.store(to_key + half, stored_high, mask=real_kv)
        from_value = value + token * value_token_stride
        from_value += kv_head[:, None] * value_head_stride + pair[None, :]
        to_value = value_cache + place
        v_low = tl.load(from_value, mask=real_kv)
        v_high = tl.load(from_value + half, mask=real_kv)
        tl.store(to_value, stored(v_low, value_cache, value_scale, LARGEST), mask=real_kv)
        tl.store(to_value + half, stored(v_high, value_cache, value_scale, LARGEST), mask=real_kv)


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
    """Rotates queries and keys and writes the cache; see `kernels.reference`."""
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return out
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
        key_cache.shape[2],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED_KV_HEADS=triton.next_power_of_2(num_kv_heads),
        PADDED_HALF=triton.next_power_of_2(head_dim // 2),
        LARGEST=largest(key_cache),
        enable_fp_fusion=True,
    )
    return out
