"""Quantized weights in the layout of the GPU kernels, and their dequantization.

A weight is `(code - zero point) * scale + offset`. Codes are integers of 4 or 8 bits, or floats in
e4m3 or e2m1; groups of an output's inputs share a scale, and a zero point or offset. In GGUF's "K"
formats, scales and offsets are small integers times those of a larger unit. MXFP4's scales are
powers of two (OCP Microscaling Formats 1.0).

Everything is in words of 4 bytes, the minimum that GPUs copy asynchronously.
"""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from octavo.kernels.activation import Activation
from octavo.kernels.reference import experts

WORDS = 16
"""Words of an output that kernels read at once. Their first codes belong to the first 16 inputs,
their second codes to the next 16, and so on."""
WORD_BITS = 32
E8M0 = torch.float8_e8m0fnu
SCALE_TYPES = (torch.float16, torch.bfloat16, E8M0)
"""The supported types of scales packed in words."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of e2m1, by their four bits."""
E2M1_GROUP = 32
"""Inputs that share a scale in MXFP4."""
E8M0_BIAS = 127
"""The exponent bias of e8m0."""
LARGEST_EXPONENT = E8M0_BIAS + 1
"""Maximum stored exponent of a scale in e8m0: kernels multiply scales by 2^126 in float32. A weight
is at most 6 times its scale, and hardly any model has weights above 12."""

FP8_MULTIPLE = 16
"""In fp8 products, the numbers of inputs and of outputs must be multiples of this."""
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
MIN_SCALE = 1e-12
"""Minimum scale of a row, for rows of zeros or nearly zeros."""


class Numbers(Enum):
    """The type of a weight's codes. The value is the number of codes in a word."""

    NIBBLES = 8  # from 0 to 15
    BYTES = 4  # from -128 to 127
    E4M3 = -4
    E2M1 = -8

    @property
    def per_word(self) -> int:
        """Number of codes in a word."""
        return abs(self.value)

    @property
    def tile(self) -> int:
        """Inputs in `WORDS` words; a weight's inputs are padded to a multiple of them."""
        return self.per_word * WORDS


class Second(Enum):
    """The second parameter of groups, besides the scale."""

    NOTHING = 0
    ZERO_POINT = 1
    OFFSET = 2


class QuantizedWeight(NamedTuple):
    """The weight of a linear layer; `make_weight` makes one.

    Attributes:
        codes: `[outputs, words]` int32; the last inputs may be padding.
        scale: `[groups, outputs]` float32; or int32 of `scale_type`.
        inputs: The number of inputs.
        group: Inputs of a group, a multiple of `WORDS`.
        numbers: The type of the codes.
        zero_point: Number subtracted from all codes, if groups have no zero points.
        second: The second parameter of groups, besides the scale.
        scale_type: The type in the words of `scale`, if that is int32. With float16 or bfloat16, a
            word holds a scale in its low half and the zero point or offset in its high half. With
            e8m0, `scale` is `[groups / 4, outputs]`: a word holds four groups' scales, one per
            byte, for `WORDS` words of codes.
        more: `[groups, outputs]` float32, the zero points or offsets if they are not in `scale`.
        outer: `[units, outputs]` int32, two float16 each: factors of scales and offsets; None if
            there are none.
    """

    codes: Tensor
    scale: Tensor
    inputs: int
    group: int
    numbers: Numbers
    zero_point: int = 0
    second: Second = Second.NOTHING
    scale_type: torch.dtype | None = None
    more: Tensor | None = None
    outer: Tensor | None = None

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return self.codes.shape[0]

    @property
    def unit(self) -> int:
        """Number of groups that share an outer scale; 1 without outer scales."""
        return 1 if self.outer is None else len(self.scale) // len(self.outer)

    def fits(self, other: object) -> bool:
        """Return whether two weights differ only in their outputs, so that they can be joined."""
        return isinstance(other, QuantizedWeight) and _kind(self) == _kind(other)


def join(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Join weights that fit each other into one, with their outputs in order."""
    joined: list[object] = []
    for name, parts in zip(QuantizedWeight._fields, zip(*weights, strict=True), strict=True):
        tensors = [part for part in parts if isinstance(part, Tensor)]
        dim = 0 if name == "codes" else 1
        joined.append(torch.cat(tensors, dim) if tensors else parts[0])
    return QuantizedWeight(*joined)  # type: ignore[arg-type]


def takes_group(group: int, inputs: int) -> bool:
    """Return whether kernels support this group size; one group of all inputs may have any size."""
    return group >= inputs or (group > 0 and group % WORDS == 0)


def make_weight(
    codes: Tensor,
    scale: Tensor,
    *,
    group: int,
    numbers: Numbers,
    zero_point: int = 0,
    zero_points: Tensor | None = None,
    offset: Tensor | None = None,
    outer: tuple[Tensor, Tensor | None] | None = None,
) -> QuantizedWeight:
    """Lay out a weight for the kernels.

    Args:
        codes: `[outputs, inputs]`: uint8 from 0 to 15, int8, or e4m3.
        scale: `[outputs, groups]`. It is stored in 16 bits if that is exact.
        group: Inputs of a group, as `takes_group` allows.
        numbers: The type of the codes.
        zero_point: Number subtracted from all codes, if there are no `zero_points`.
        zero_points: `[outputs, groups]`, integers; excludes `offset`.
        offset: `[outputs, groups]`.
        outer: `[outputs, units]` float16, factors of scales and offsets. With them, scales and
            offsets must be exact in float16.
    """
    inputs, tile = codes.shape[1], numbers.tile
    padded = -(-inputs // tile) * tile
    group = padded if group >= inputs else group
    unit = 1 if outer is None else scale.shape[1] // outer[0].shape[1]
    groups = -(-padded // group)
    groups = -(-groups // unit) * unit
    extra = offset if zero_points is None else zero_points
    second = Second.NOTHING
    if extra is not None:
        second = Second.OFFSET if zero_points is None else Second.ZERO_POINT
    halves = (torch.float16, torch.bfloat16)
    kind = next((kind for kind in halves if _has(kind, scale) and _has(kind, extra)), None)
    assert kind == torch.float16 or outer is None
    by_group = [_by_group(part, groups) for part in (scale, extra)]
    words = None
    if outer is not None:
        words = _as_words([_by_group(part, groups // unit) for part in outer], torch.float16)
    return QuantizedWeight(
        _pack(pad(codes.view(torch.uint8), (0, padded - inputs)), numbers),
        by_group[0].float() if kind is None else _as_words(by_group, kind),  # type: ignore[union-attr]
        inputs,
        group,
        numbers,
        zero_point,
        second,
        kind,
        by_group[1].float() if kind is None and by_group[1] is not None else None,
        words,
    )


def make_e2m1(codes: Tensor, exponents: Tensor) -> QuantizedWeight | None:
    """Lay out a weight in MXFP4 for the kernels.

    Args:
        codes: `[outputs, inputs]` uint8, the bits of e2m1 values.
        exponents: `[outputs, inputs / 32]` uint8, a group's scale in e8m0.

    Returns:
        The weight; None if a scale is larger than kernels take.
    """
    inputs, tile = codes.shape[1], Numbers.E2M1.tile
    if int(exponents.max()) > LARGEST_EXPONENT:
        return None
    padded = -(-inputs // tile) * tile
    per_word = tile // E2M1_GROUP
    scale = pad(exponents, (0, padded // E2M1_GROUP - exponents.shape[1]))
    parts = scale.reshape(len(scale), -1, per_word).int() << 8 * torch.arange(
        per_word, dtype=torch.int32, device=scale.device
    )
    return QuantizedWeight(
        _pack(pad(codes, (0, padded - inputs)), Numbers.E2M1),
        parts.sum(-1, dtype=torch.int32).t().contiguous(),
        inputs,
        E2M1_GROUP,
        Numbers.E2M1,
        scale_type=E8M0,
    )


def widen_scales(weight: QuantizedWeight) -> QuantizedWeight:
    """Convert scales, and zero points or offsets, to float32.

    The weight may then fit more weights. Scales in e8m0 and of units stay.
    """
    if weight.scale_type in {None, E8M0} or weight.outer is not None:
        return weight
    scale, second = _unpack_scales(weight.scale, weight.scale_type)
    more = None if weight.second == Second.NOTHING else second.contiguous()
    return weight._replace(scale=scale.contiguous(), scale_type=None, more=more)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Dequantize to `[outputs, inputs]` float32."""
    numbers = weight.numbers
    bits = WORD_BITS // numbers.per_word
    words = weight.codes.reshape(weight.outputs, -1, 1, WORDS)
    codes = (words >> _shifts(numbers, words.device)) & ((1 << bits) - 1)
    codes = codes.to(torch.uint8).flatten(1)
    if numbers == Numbers.E2M1:
        codes = torch.tensor(E2M1, device=words.device)[codes.int()]
    elif numbers != Numbers.NIBBLES:
        codes = codes.view(torch.int8 if numbers == Numbers.BYTES else torch.float8_e4m3fn)
    groups = torch.arange(weight.inputs, device=words.device) // weight.group
    scale, second = _unpack_scales(weight.scale, weight.scale_type)
    second = second if weight.more is None else weight.more
    if weight.outer is not None:
        units = torch.arange(len(scale), device=words.device) // weight.unit
        outer, outer_offset = _unpack_scales(weight.outer, torch.float16)
        scale, second = scale * outer[units], second * outer_offset[units]
    weights = codes[:, : weight.inputs].float()
    weights -= second[groups].t() if weight.second == Second.ZERO_POINT else weight.zero_point
    weights *= scale[groups].t()
    return weights + second[groups].t() if weight.second == Second.OFFSET else weights


def quantized_experts(  # noqa: PLR0917
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    up: QuantizedWeight,
    up_bias: Tensor | None,
    down: QuantizedWeight,
    down_bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    """Compute experts in plain PyTorch; see `octavo.kernels.ops.quantized_experts`."""
    ups, downs = (
        dequantize(weight).to(x.dtype).reshape(down.outputs // x.shape[1], -1, weight.inputs)
        for weight in (up, down)
    )
    return experts(x, expert_ids, weights, ups, up_bias, downs, down_bias, activation)


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Compute a layer in plain PyTorch; see `octavo.kernels.ops.quantized_linear`."""
    wide = None if bias is None else bias.float()
    return linear(x.float(), dequantize(weight).to(x.dtype).float(), wide).to(dtype)


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a layer in plain PyTorch; see `octavo.kernels.ops.fp8_linear`."""
    scales = (x.float().abs().amax(1, keepdim=True) / LARGEST).clamp_min(MIN_SCALE)
    rows = (x.float() / scales).clamp(-LARGEST, LARGEST).to(E4M3).float() * scales
    return linear(rows, weight.float() * scale.t(), None if bias is None else bias.float()).to(
        x.dtype
    )


def has_fp8_products(_: torch.device, __: torch.dtype) -> bool:
    """Return False: CPUs have kernels of their own for weights in 8 bits."""
    return False


def _pack(codes: Tensor, numbers: Numbers) -> Tensor:
    """Return `[outputs, inputs]` uint8 as words, `[outputs, words]` int32."""
    parts = codes.reshape(len(codes), -1, numbers.per_word, WORDS).int()
    shifted = parts << _shifts(numbers, codes.device)
    return shifted.sum(2, dtype=torch.int32).flatten(1)


def _shifts(numbers: Numbers, device: torch.device) -> Tensor:
    """Return the first bit of each code in a word, `[numbers, 1]` int32.

    Every other code is in the high half, as kernels unpack one code of each half at once.
    """
    place = torch.arange(numbers.per_word, dtype=torch.int32, device=device)
    bits = WORD_BITS // numbers.per_word
    return (place // 2 * bits + place % 2 * (WORD_BITS // 2))[:, None]


def _by_group(values: Tensor | None, count: int) -> Tensor | None:
    """Return `[count, outputs]` of `[outputs, groups]`, with zeros after the last group."""
    return (
        None if values is None else pad(values.t(), (0, 0, 0, count - values.shape[1])).contiguous()
    )


def _has(kind: torch.dtype, values: Tensor | None) -> bool:
    """Return whether a dtype represents all values of a tensor exactly."""
    return values is None or torch.equal(values.to(kind).float(), values.float())


def _as_words(parts: Sequence[Tensor | None], kind: torch.dtype) -> Tensor:
    """Pack two tensors of `[groups, outputs]` into the halves of words; None becomes zeros."""
    low, high = parts
    assert low is not None
    high = torch.zeros_like(low) if high is None else high
    halves = torch.stack([low.to(kind), high.to(kind)], -1)
    return halves.view(torch.int32).squeeze(-1)


def _unpack_scales(words: Tensor, kind: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """Return scales, and zero points or offsets, `[groups, outputs]` float32."""
    if kind is None:
        return words, torch.zeros_like(words)
    if kind == E8M0:
        # The exponent has float32's bits; only 2^-127 is subnormal in float32.
        bits = (words.unsqueeze(-1).view(torch.uint8).int() << 23).clamp(min=1 << 22)
        scale = bits.view(torch.float32).movedim(-1, 1).flatten(0, 1)
        return scale, torch.zeros_like(scale)
    low, high = words.unsqueeze(-1).view(kind).float().unbind(-1)
    return low, high


def _kind(weight: QuantizedWeight) -> tuple[object, ...]:
    """Return the properties that weights must share to be joined."""
    return tuple(
        (value.dtype, value.shape[1:] if name == "codes" else len(value))
        if isinstance(value, Tensor)
        else value
        for name, value in zip(QuantizedWeight._fields, weight, strict=True)
    )
