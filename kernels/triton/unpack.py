"""Products with quantized weights, which are dequantized in registers.

A program multiplies the weights by the transposed rows: matrix units take that operand from
registers, where the dequantized weights are.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import Gpu
from octavo.kernels.quantized import SCALE_TYPES, WORDS, Numbers, QuantizedWeight, Second
from octavo.kernels.triton.tiles import WIDE_WARP

MAX_STAGES = 4
WORD_BYTES = 4
SCALES_BYTES = 8 << 10
"""Maximum bytes of scales in shared memory."""
_BIAS = {Numbers.NIBBLES: 128}
"""Number that `_numbers` adds to its results."""
_FACTOR = {Numbers.E4M3: 2.0**8, Numbers.E2M1: 2.0**126}
"""Number that `_numbers` divides its results by."""


class UnpackedTiles(NamedTuple):
    """The sizes of a program's tiles.

    Attributes:
        rows: Rows per program.
        columns: Outputs per program.
        warps: Warps per program.
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
    columns, warps, beside = 128 if program_rows < 64 else 64, 4, 2
    if rows > 64 and has_wide_tiles(gpu, dtype):
        program_rows = 256 if rows > 128 and gpu.multiplies_in_place else 128
        columns, warps = 128, 8
        beside = 2 if gpu.multiplies_in_place and program_rows == 128 else 1
    elif gpu.is_amd and gpu.warp_size < WIDE_WARP:
        warps = 8
    # Two programs side by side, where registers allow. Operands that meet registers are needed a
    # stage longer.
    each = weight.numbers.tile * program_rows * dtype.itemsize + columns * WORDS * WORD_BYTES
    room = gpu.shared_bytes // beside - gpu.reserved_bytes - SCALES_BYTES
    stages = room // each + (not gpu.multiplies_in_place)
    most = MAX_STAGES if dtype.itemsize < WORD_BYTES else MAX_STAGES - 1
    stages = 2 if gpu.is_amd else max(2, min(stages, most))
    return UnpackedTiles(program_rows, columns, warps, stages)


def has_wide_tiles(gpu: Gpu, dtype: torch.dtype) -> bool:
    """Return whether programs may take 128 or 256 rows, to unpack weights less often.

    Unpacking a weight takes 6 to 10 instructions of a thread. While a multiprocessor of an H100
    multiplies a tile of int4, 64 rows x 64 outputs x 128 inputs, in 256 cycles, its four schedulers
    need 445 to unpack the weights. With 128 outputs they need 876 of 1,024 cycles for 128 rows, and
    946 of 2,048 for 256.

    The arithmetic is float32, rounded to the rows' type in pairs. In pairs of bfloat16 it would
    take 4 instead of 7 instructions for two weights, but round scales of float16 first.

    AMD's GPUs have too few registers for it. For data-centre Blackwell (10 and 11), Triton 3.7
    compiles such programs to a trap. Numbers of float32 have no matrix units.
    """
    return dtype.itemsize == 2 and not gpu.is_amd and gpu.capability[0] not in {10, 11}


def depth_of(weight: QuantizedWeight) -> int:
    """Return the number of iterations over all inputs."""
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
    """Return one code of each word in float32, changed by `_BIAS` or `_FACTOR`."""
    if KIND == 4:
        bits = words << (24 - 8 * (PLACE // 2) - 16 * (PLACE % 2))
        return (bits >> 24).to(tl.float32)
    if KIND == 8:
        # Sets the bits of code + 128 in bfloat16, two codes at a time: faster than a conversion.
        pair = ((words >> (4 * (PLACE // 2))) & 0x000F000F) | 0x43004300
        bits = pair & -65536 if PLACE % 2 else pair << 16
        return bits.to(tl.float32, bitcast=True)
    # Moves the bits of two small floats to their place in a longer type. The exponent's bias does
    # not change, so the value is smaller by a constant factor.
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
    """Return each output's factor and addend, `[COLUMNS]` float32, at a place of a step's words."""
    group = (step * PLACES + PLACE) * WORDS // GROUP
    place = group * outputs + column
    if SCALES == 3:  # e8m0: a step has one word
        words = tl.load(scale + step * outputs + column, mask=exists, other=0)
        bits = (words >> (8 * (PLACE * WORDS // GROUP))) & 0xFF
        # The exponent has float32's bits; only 2^-127 is subnormal in float32.
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
    """Dequantize the codes at a place of the words to `[COLUMNS, WORDS]`."""
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
    exists,  # which columns exist
    real,  # which rows exist
    inputs,
    outputs,
    depth,  # steps over all inputs
    begin,
    end,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,  # codes per word
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,  # consecutive inputs that always share a group
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    SECOND: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
    ADDS: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32, whatever the operands' dtype
):
    """Multiply some steps of inputs; return `[COLUMNS, ROWS]` float32."""
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
