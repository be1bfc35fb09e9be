"""KV caches of whole numbers: codes of 8 or 4 bits, with a scale for each head of each token.

In 4 bits there is an offset too: an element is `scale * code + offset`. A token's key or value
takes the bytes of its codes and, beside them, those of a scale and an offset in bfloat16. A backend
may order the bytes of a block's head as it likes; `pack` has the order of the kernels in plain
PyTorch.
"""

import math

import torch
from torch import Tensor

BITS = {torch.int8: 8, torch.uint8: 4}
"""Bits per element by the cache's dtype."""
NAMES = {torch.int8: "int8", torch.uint8: "int4"}
"""Values of `EngineSettings.kv_cache_dtype` by the cache's dtype."""
MIN_BLOCK_SIZE = 16
"""Minimum tokens per block of such a cache."""
BESIDE = {torch.int8: 2, torch.uint8: 4}
"""Bytes beside the codes of a token's key or value."""


def width_of(dim: int, dtype: torch.dtype) -> int:
    """Return the elements of a cache's dtype that a key or value of `dim` elements takes."""
    return dim * BITS[dtype] // 8 + BESIDE[dtype] if dtype in BITS else dim


def dim_of(cache: Tensor) -> int:
    """Return the elements of keys or values in `[num_blocks, num_kv_heads, block_size, width]`."""
    width, dtype = cache.shape[3], cache.dtype
    return (width - BESIDE[dtype]) * 8 // BITS[dtype] if dtype in BITS else width


def spread(x: Tensor) -> Tensor:
    """Multiply parts of heads by the Hadamard matrix, which is its own inverse.

    This is done to keys and queries, whose products stay. Few elements of keys are large: it
    spreads them over all of a part, which is as long as the greatest power of two that divides a
    head.
    """
    part = x.shape[-1] & -x.shape[-1]
    half = 1
    while half < part:
        low, high = x.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack([low + high, low - high], -2).flatten(-3)
        half *= 2
    return x * (1 / math.sqrt(part))


def encode(x: Tensor, dtype: torch.dtype, *, keys: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Round keys or values, `[..., dim]`.

    Returns:
        Codes `[..., dim]`, and scales and offsets `[..., 1]`, all float32. Elements that are not
        finite make the scale NaN.
    """
    wide = spread(x.float()) if keys else x.float()
    least, greatest = wide.aminmax(dim=-1, keepdim=True)
    symmetric = BITS[dtype] == 8
    last = 2.0 ** (BITS[dtype] - 1) - 1
    steps = torch.maximum(-least, greatest) / last if symmetric else (greatest - least) / 15
    scale = _above(steps.clamp(min=2.0**-126) + (wide * 0).sum(-1, keepdim=True))
    offset = (least + greatest) * 0.5 + scale * 0.5
    offset = torch.zeros_like(scale) if symmetric else offset.bfloat16().float()
    return ((wide - offset) / scale).round().clamp(-last - 1, last), scale, offset


def rounded(x: Tensor, dtype: torch.dtype, *, keys: bool) -> Tensor:
    """Return keys or values `[..., dim]` as a cache of `dtype` keeps them, in float32."""
    return unpack(pack(x, dtype, keys=keys), keys=keys)


def pack(x: Tensor, dtype: torch.dtype, *, keys: bool) -> Tensor:
    """Return keys or values `[..., dim]` as `[..., width]` of a cache's dtype."""
    codes, scale, offset = encode(x, dtype, keys=keys)
    whole = codes.nan_to_num().to(torch.int8).view(torch.uint8)
    if BITS[dtype] == 4:
        whole = whole[..., ::2] & 15 | whole[..., 1::2] << 4
    beside = torch.cat([scale, offset], -1)[..., : BESIDE[dtype] // 2].bfloat16()
    return torch.cat([whole, beside.view(torch.uint8)], -1).view(dtype)


def unpack(rows: Tensor, *, keys: bool) -> Tensor:
    """Return keys or values `[..., dim]` in float32 of `[..., width]`, as `pack` returns them."""
    raw, count = rows.view(torch.uint8), rows.shape[-1] - BESIDE[rows.dtype]
    scale = raw[..., count:].contiguous().view(torch.bfloat16).float()
    codes = raw[..., :count].contiguous().view(torch.int8)
    if BITS[rows.dtype] == 8:
        wide = codes.float() * scale
    else:
        halves = torch.stack([codes << 4 >> 4, codes >> 4], -1).flatten(-2)
        wide = halves.float() * scale[..., :1] + scale[..., 1:]
    return spread(wide) if keys else wide


def _above(x: Tensor) -> Tensor:
    """Return the least bfloat16 that is not below a positive number, in float32."""
    return (((x.view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32)
