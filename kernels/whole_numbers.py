"""KV caches of whole numbers: codes of 8 bits, with a scale for each head of each token.

A token's key or value takes the bytes of its codes and, beside them, those of a scale in bfloat16.
A backend may order the bytes of a block's head as it likes; `pack` has the order of the kernels in
plain PyTorch.
"""

import math

import torch
from torch import Tensor

SCALE_BYTES = 2
"""Bytes beside the codes of a token's key or value."""
MIN_BLOCK_SIZE = 16
"""Minimum tokens per block of such a cache."""


def width_of(dim: int, dtype: torch.dtype) -> int:
    """Return the elements of a cache's dtype that a key or value of `dim` elements takes."""
    return dim + SCALE_BYTES if dtype == torch.int8 else dim


def dim_of(cache: Tensor) -> int:
    """Return the elements of keys or values in `[num_blocks, num_kv_heads, block_size, width]`."""
    return cache.shape[3] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def part_of(dim: int) -> int:
    """Return the length of the parts of a head that are spread: the greatest that divides it."""
    return dim & -dim


def spread(x: Tensor) -> Tensor:
    """Multiply parts of heads by the Hadamard matrix, which is its own inverse.

    This is done to keys and queries, whose products stay. Few elements of keys are large: it
    spreads them over all of a part, which is as long as the greatest power of two that divides a
    head.
    """
    part, half = part_of(x.shape[-1]), 1
    while half < part:
        low, high = x.reshape(*x.shape[:-1], -1, 2, half).unbind(-2)
        x = torch.stack([low + high, low - high], -2).flatten(-3)
        half *= 2
    return x * (1 / math.sqrt(part))


def encode(x: Tensor, *, keys: bool) -> tuple[Tensor, Tensor]:
    """Round keys or values, `[..., dim]`.

    Returns:
        Codes `[..., dim]` and scales `[..., 1]`, both float32. Elements that are not finite make
        the scale NaN.
    """
    wide = spread(x.float()) if keys else x.float()
    steps = wide.abs().amax(-1, keepdim=True) / 127
    scale = _above(steps.clamp(min=2.0**-126) + (wide * 0).sum(-1, keepdim=True))
    return (wide / scale).round(), scale


def rounded(x: Tensor, *, keys: bool) -> Tensor:
    """Return keys or values `[..., dim]` as a cache keeps them, in float32."""
    return unpack(pack(x, keys=keys), keys=keys)


def pack(x: Tensor, *, keys: bool) -> Tensor:
    """Return keys or values `[..., dim]` as `[..., width]` of a cache."""
    codes, scale = encode(x, keys=keys)
    return torch.cat([codes.nan_to_num().to(torch.int8), scale.bfloat16().view(torch.int8)], -1)


def unpack(rows: Tensor, *, keys: bool) -> Tensor:
    """Return keys or values `[..., dim]` in float32 of `[..., width]`, as `pack` returns them."""
    codes, scale = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous()
    wide = codes.float() * scale.view(torch.bfloat16).float()
    return spread(wide) if keys else wide


def _above(x: Tensor) -> Tensor:
    """Return the least bfloat16 that is not below a positive number, in float32."""
    return (((x.view(torch.int32) + 0xFFFF) >> 16) << 16).view(torch.float32)
