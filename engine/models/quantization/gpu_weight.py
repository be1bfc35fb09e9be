"""Weights for the GPU kernels: rounded here, or unchanged from checkpoints."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.engine.models.quantization.formats.base import (
    ZERO_OF_BYTES,
    Integers,
    ScaledFp8,
    StoredWeight,
)
from octavo.engine.models.quantization.formats.gguf import Blocks
from octavo.engine.models.quantization.rounding import EPSILON, round_to_4_bits
from octavo.kernels.cpu.linear import GROUP
from octavo.kernels.quantized import (
    LARGEST,
    Numbers,
    QuantizedWeight,
    make_weight,
    takes_group,
)


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A layer's weights for the GPU kernels.

    Attributes:
        weight: The weights.
        order: `[inputs]` int64, the input of each column; None if they are in order.
        as_fp8: `[outputs, inputs]` e4m3 and `[outputs]` float32 scales, if inputs may also be
            rounded to fp8.
    """

    weight: QuantizedWeight
    order: Tensor | None = None
    as_fp8: tuple[Tensor, Tensor] | None = None

    def fits(self, other: "GpuWeight") -> bool:
        """Return whether the weights of two layers of the same input can be joined."""
        if (self.as_fp8 is None) != (other.as_fp8 is None):
            return False
        if self.order is None or other.order is None:
            return self.order is other.order and self.weight.fits(other.weight)
        return torch.equal(self.order, other.order) and self.weight.fits(other.weight)


def round_to_int8(weight: Tensor) -> GpuWeight:
    """Round each output's weights, `[outputs, inputs]`, to bytes with one scale."""
    wide = weight.float()
    scale = wide.abs().amax(1, keepdim=True).clamp_min(EPSILON) / 127
    codes = (wide / scale).round_().to(torch.int8)
    return GpuWeight(make_weight(codes, scale, group=wide.shape[1], numbers=Numbers.BYTES))


def round_to_int4(weight: Tensor) -> GpuWeight:
    """Round groups of `GROUP` weights to 4 bits; outputs without whole groups to bytes."""
    if weight.shape[1] % GROUP:
        return round_to_int8(weight)
    codes, scale, offset = round_to_4_bits(weight.float(), weight.dtype)
    made = make_weight(
        codes.flatten(1).to(torch.uint8),
        scale[..., 0],
        group=GROUP,
        numbers=Numbers.NIBBLES,
        zero_point=8,
        offset=offset[..., 0],
    )
    return GpuWeight(made)


def round_to_fp8(weight: Tensor) -> GpuWeight:
    """Round each output's weights to e4m3 with one scale."""
    wide = weight.float()
    scale = wide.abs().amax(1).clamp_min(EPSILON) / LARGEST
    codes = (wide / scale[:, None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return fp8_weight(codes, scale[:, None], wide.shape[1])


def fp8_weight(codes: Tensor, scale: Tensor, group: int) -> GpuWeight:
    """Return weights in e4m3, with `[outputs, groups]` scales of groups of inputs."""
    made = make_weight(codes, scale, group=group, numbers=Numbers.E4M3)
    whole = scale.shape[1] == 1
    return GpuWeight(made, as_fp8=(codes, scale[:, 0].float()) if whole else None)


def stored_weight(stored: StoredWeight | None) -> GpuWeight | None:
    """Return a checkpoint's weight for the kernels; None if they do not support it."""
    if isinstance(stored, Integers):
        return _integers(stored)
    if isinstance(stored, ScaledFp8):
        group = stored.codes.shape[1] if stored.block is None else stored.block[1]
        if not takes_group(group, stored.codes.shape[1]):
            return None
        return fp8_weight(stored.codes, stored.scale_of_outputs(), group)
    return _blocks(stored) if isinstance(stored, Blocks) else None


def _integers(stored: Integers) -> GpuWeight | None:
    size = stored.group_size
    if size is None or not takes_group(size, stored.codes.shape[1]):
        return None
    order = stored.order()
    codes = stored.codes if order is None else stored.codes[:, order]
    nibbles = stored.bits <= 4
    shift = 0 if nibbles else ZERO_OF_BYTES
    zero_points = stored.zero - shift
    shared = float(zero_points.flatten()[0])
    alike = bool((zero_points == shared).all())
    made = make_weight(
        codes if nibbles else (codes.short() - shift).to(torch.int8),
        stored.scale,
        group=size,
        numbers=Numbers.NIBBLES if nibbles else Numbers.BYTES,
        zero_point=int(shared) if alike else 0,
        zero_points=None if alike else zero_points,
    )
    return GpuWeight(made, order)


def _blocks(stored: Blocks) -> GpuWeight:
    block_format, fields = stored.format, stored.fields()
    codes = fields.codes.flatten(1)
    nibbles = block_format.bits == 4
    zero_point = (
        0 if block_format.has_min or block_format.bits == 8 else 1 << (block_format.bits - 1)
    )
    scale, offset, outer = fields.scale, fields.least, None
    if fields.scales is not None:
        small = fields.scales.view(torch.int8) if block_format.bits == 6 else fields.scales
        least = None if fields.least is None else -fields.least
        outer = (fields.scale, least)
        scale = small.flatten(1)
        offset = None if fields.mins is None else fields.mins.flatten(1)
    made = make_weight(
        codes if nibbles else codes.view(torch.int8),
        scale,
        group=block_format.group,
        numbers=Numbers.NIBBLES if nibbles else Numbers.BYTES,
        zero_point=zero_point,
        offset=offset,
        outer=outer,
    )
    return GpuWeight(made)
