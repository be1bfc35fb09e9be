"""Products with quantized weights, which are dequantized in registers.

A program multiplies the weights by the transposed rows: so the weights, which were just computed,
are the operand that matrix units take from registers.
"""

# Triton compiles its kernels' source, where types are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import Gpu
from octavo.kernels.quantized import SCALE_TYPES, WORDS, Numbers, QuantizedWeight, Second

MAX_STAGES = 4
WORD_BYTES = 4
SCALES_BYTES = 8 << 10
"""Maximum shared memory of scales."""
_BIAS = {Numbers.NIBBLES: 128}
"""`_numbers` returns a number plus this."""
_FACTOR = {Numbers.E4M3: 2.0**8, Numbers.E2M1: 2.0**126}
"""`_numbers` returns a number divided by this."""


class UnpackedTiles(NamedTuple):
    """The sizes of a program's tiles.

    Attributes:
        rows: Rows of a program.
        columns: Outputs of a program.
        warps: Warps of a program.
        stages: Iterations in flight.
    """

    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        """Arguments of a kernel's launch and compilation."""
        return {
            "ROWS": self.rows,
            "COLUMNS": self.columns,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def choose_unpacked_tiles(
    gpu: Gpu, rows: float, weight: QuantizedWeight, dtype: torch.dtype
) -> UnpackedTiles:
    """Return the tiles for a GPU.

    Args:
        gpu: The GPU.
        rows: Rows that a weight is multiplied by; for experts, the mean.
        weight: The weight.
        dtype: Dtype of the rows.
    """
    program_rows = 16 if rows <= 16 else 32 if rows <= 32 else 64
    columns = 128 if program_rows < 64 else 64  # more of both need more registers than there are
    # Two programs side by side. Operands that meet registers are needed a stage longer.
    each = weight.numbers.tile * program_rows * dtype.itemsize + columns * WORDS * WORD_BYTES
    room = gpu.shared_bytes // 2 - gpu.reserved_bytes - SCALES_BYTES
    stages = room // each + (not gpu.multiplies_in_place)
    most = MAX_STAGES if dtype.itemsize < WORD_BYTES else MAX_STAGES - 1
    stages = 2 if gpu.is_amd else max(2, min(stages, most))
    warps = 8 if gpu.is_amd and gpu.warp_size == 32 else 4
    return UnpackedTiles(program_rows, columns, warps, stages)


def depth_of(weight: QuantizedWeight) -> int:
    """Return the iterations that all inputs take."""
    return weight.codes.shape[1] // WORDS


def tensors_of(weight: QuantizedWeight) -> tuple[Tensor | None, ...]:
    """Return a weight's tensors in the order of the kernels' arguments."""
    return weight.codes, weight.scale, weight.more, weight.outer


def constants_of(weight: QuantizedWeight) -> dict[str, Any]:
    """Return the constants that kernels are compiled with for a weight."""
    zero_point = _BIAS.get(weight.numbers, 0)
    if weight.second != Second.ZERO_POINT:
        zero_point += weight.zero_point
    kind = weight.scale_type
    return {
        "WORDS": WORDS,
        "PLACES": weight.numbers.per_word,
        "KIND": weight.numbers.value,
        "GROUP": weight.group,
        "SHARED": math.gcd(weight.group, weight.numbers.tile),
        "UNIT": weight.unit,
        "SCALES": 0 if kind is None else 1 + SCALE_TYPES.index(kind),
        "SECOND": weight.second.value,
        "ZERO_POINT": float(zero_point),
        "FACTOR": _FACTOR.get(weight.numbers, 1.0),
        "ADDS": zero_point != 0 or weight.second != Second.NOTHING,
    }


@triton.jit
def _numbers(words, PLACE: tl.constexpr, KIND: tl.constexpr):
    """Return one number of each word in float32, changed by `_BIAS` or `_FACTOR`."""
    if KIND == 4:
        bits = words << (24 - 8 * (PLACE // 2) - 16 * (PLACE % 2))
        return (bits >> 24).to(tl.float32)
    if KIND == 8:
        # The bits of the number plus 128 in bfloat16, two at a time: a conversion takes longer.
        pair = ((words >> (4 * (PLACE // 2))) & 0x000F000F) | 0x43004300
        bits = pair & -65536 if PLACE % 2 else pair << 16
        return bits.to(tl.float32, bitcast=True)
    # The bits of two small floats, moved to where a longer type has them. The exponent's bias is
    # not changed, so the number is smaller by a constant factor.
    if KIND == -8:
        shift: tl.constexpr = 6 - 4 * (PLACE // 2)
        magnitude = words << shift if shift > 0 else words >> -shift
        pair = ((words << (shift + 6)) & -2147450880) | (magnitude & 0x01C001C0)
        bits = pair & -65536 if PLACE % 2 else pair << 16
        return bits.to(tl.float32, bitcast=True)
    pair = words >> 8 if PLACE >= 2 else words
    pair = ((pair & 0x00800080) << 8) | ((pair & 0x007F007F) << 7)
    bits = pair >> 16 if PLACE % 2 else pair
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _halves(words, SCALES: tl.constexpr):
    """Return the halves of words, of float16 (1) or bfloat16 (2), in float32."""
    if SCALES == 1:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def scales_at(  # noqa: PLR0917
    scale,
    more,
    outer,
    step,
    column,
    exists,
    outputs,
    PLACE: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    SECOND: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Return the factor and the addend of each output, `[COLUMNS]` float32, for a step's place."""
    group = (step * PLACES + PLACE) * WORDS // GROUP
    place = group * outputs + column
    if SCALES == 3:  # e8m0, of which a step has a word
        words = tl.load(scale + step * outputs + column, mask=exists, other=0)
        bits = (words >> (8 * (PLACE * WORDS // GROUP))) & 0xFF
        # The exponent's bits are float32's; only 2^-127 is subnormal there.
        factor = tl.maximum(bits << 23, 1 << 22).to(tl.float32, bitcast=True)
        second = factor
    elif SCALES == 0:
        factor = tl.load(scale + place, mask=exists, other=0.0)
        second = factor
        if SECOND != 0:
            second = tl.load(more + place, mask=exists, other=0.0)
    else:
        factor, second = _halves(tl.load(scale + place, mask=exists, other=0), SCALES)
    if UNIT > 1:
        words = tl.load(outer + group // UNIT * outputs + column, mask=exists, other=0)
        outer_scale, outer_offset = _halves(words, 1)
        factor *= outer_scale
        second *= outer_offset
    if SECOND == 0:
        addend = -ZERO_POINT * factor
    elif SECOND == 1:
        addend = -(ZERO_POINT + second) * factor
    else:
        addend = second - ZERO_POINT * factor
    return factor * FACTOR, addend


@triton.jit
def unpack(  # noqa: PLR0917
    words, PLACE: tl.constexpr, KIND: tl.constexpr, factor, addend, ADDS: tl.constexpr
):
    """Return the weights `[COLUMNS, WORDS]` of the numbers at a place of the words."""
    weights = _numbers(words, PLACE, KIND) * factor[:, None]
    return weights + addend[:, None] if ADDS else weights


@triton.jit
def multiply_unpacked(  # noqa: PLR0917
    from_rows,  # `[ROWS]`
    codes,
    scale,
    more,
    outer,
    column,  # `[COLUMNS]`, of the outputs that the weight has
    exists,  # which columns do
    real,  # which rows exist
    inputs,
    outputs,
    depth,  # steps that all inputs take
    begin,
    end,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,  # numbers of a word
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,  # consecutive inputs that are always of one group
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    SECOND: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
    ADDS: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32, whatever the operands' dtype
):
    """Return the products of some steps of inputs, `[COLUMNS, ROWS]` float32."""
    word = tl.arange(0, WORDS)
    from_codes = codes + column.to(tl.int64)[:, None] * (depth * WORDS) + word[None, :]
    from_elements = from_rows[None, :] + word[:, None]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(begin, end):
        words = tl.load(from_codes + step * WORDS, mask=exists[:, None], other=0)
        for place in tl.static_range(PLACES):
            first = (step * PLACES + place) * WORDS
            if place * WORDS % SHARED == 0:
                factor, addend = scales_at(
                    *(scale, more, outer, step, column, exists, outputs, place, WORDS, PLACES),
                    *(GROUP, UNIT, SCALES, SECOND, ZERO_POINT, FACTOR),
                )
            weights = unpack(words, place, KIND, factor, addend, ADDS)
            known = real[None, :] & (first + word < inputs)[:, None]
            these = tl.load(from_elements + first, mask=known, other=0.0)
            weights = weights.to(these.dtype)
            if UPCAST:
                these, weights = these.to(tl.float32), weights.to(tl.float32)
            total = tl.dot(weights, these, total, input_precision="ieee")
    return total
