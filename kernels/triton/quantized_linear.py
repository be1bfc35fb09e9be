"""Linear layers of quantized weights: products that unpack weights in registers.

A program has a tile of outputs and of rows, and a part of the inputs. It multiplies the weights by
the transposed rows: so the weights, which were just computed, are the operand that matrix units
take from registers. With few rows, the inputs are split so that every multiprocessor reads weights;
a second kernel adds the parts up in their order, as a row's result must not depend on chance.

With many rows arithmetic takes longer than reading. Then some outputs at a time are dequantized to
memory, and multiplied as any weights.
"""

# Triton compiles its kernels' source, where types are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import Gpu, describe_gpu
from octavo.kernels.quantized import PAIRS, WORDS, Numbers, QuantizedWeight, Second

MANY_ROWS = 256
"""From so many rows on, weights are dequantized to memory: writing and reading them there takes
less than unpacking them for every 64 rows."""
DEQUANTIZED_BYTES = 64 << 20
"""Of weights that are dequantized at a time."""
LEAST_DEPTH = 4
"""Iterations of a part of the inputs, at least."""
MOST_SPLITS, MOST_STAGES = 16, 4
WORD_BYTES = 4
SCALES_BYTES = 8 << 10
"""Of shared memory, that scales take at most."""
PROGRAMS_EACH = 4
"""Programs that a multiprocessor should have, so that some read while others compute."""
_BIAS = {Numbers.NIBBLES: 128}
"""What `_numbers` returns is so much more."""
_FACTOR = {Numbers.E4M3: 256.0}
"""By what it is to be multiplied."""
MERGED_COLUMNS, DEQUANTIZED_COLUMNS = 512, 64
"""Outputs of a program of what adds parts up, and of what dequantizes."""


class LinearTiles(NamedTuple):
    """How a product is divided.

    Attributes:
        rows: Rows of a program.
        columns: Its outputs.
        splits: Parts of the inputs.
        warps: Warps of a program.
        stages: Iterations in flight.
    """

    rows: int
    columns: int
    splits: int
    warps: int
    stages: int


def choose_linear_tiles(
    gpu: Gpu, rows: int, weight: QuantizedWeight, dtype: torch.dtype
) -> LinearTiles:
    """Return the tiles for a GPU.

    Args:
        gpu: The GPU.
        rows: All rows.
        weight: The weight.
        dtype: Of the rows.
    """
    own = 16 if rows <= 16 else 32 if rows <= 32 else 64
    columns = 128 if own < 64 else 64  # more of both need more registers than there are
    programs = triton.cdiv(weight.outputs, columns) * triton.cdiv(rows, own)
    wanted = triton.cdiv(PROGRAMS_EACH * gpu.multiprocessors, programs)
    splits = max(1, min(wanted, _depth(weight) // LEAST_DEPTH, MOST_SPLITS))
    # Two programs side by side. What is multiplied by registers is needed a stage longer.
    each = weight.numbers.tile * own * dtype.itemsize + columns * WORDS * WORD_BYTES
    room = gpu.shared_bytes // 2 - gpu.reserved_bytes - SCALES_BYTES
    stages = room // each + (not gpu.multiplies_in_place)
    stages = 2 if gpu.is_amd else max(2, min(stages, MOST_STAGES))
    warps = 8 if gpu.is_amd and gpu.warp_size == 32 else 4
    return LinearTiles(own, columns, splits, warps, stages)


@triton.jit
def _numbers(words, PLACE: tl.constexpr, KIND: tl.constexpr):
    """Return one number of each word, in float32; see `_BIAS` and `_FACTOR` for what they are."""
    if KIND == 4:
        own = words << (24 - 8 * (PLACE // 2) - 16 * (PLACE % 2))
        return (own >> 24).to(tl.float32)
    if KIND == 8:
        # The bits of the number plus 128 in bfloat16, two at a time: a conversion takes longer.
        pair = ((words >> (4 * (PLACE // 2))) & 0x000F000F) | 0x43004300
        own = pair & -65536 if PLACE % 2 else pair << 16
        return own.to(tl.float32, bitcast=True)
    # E4M3's bits, two at a time, where float16 has them: a number 256 times less.
    pair = words >> 8 if PLACE >= 2 else words
    pair = ((pair & 0x00800080) << 8) | ((pair & 0x007F007F) << 7)
    own = pair >> 16 if PLACE % 2 else pair
    return own.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _halves(words, PAIR: tl.constexpr):
    """Return the halves of words, of float16 (1) or bfloat16 (2), in float32."""
    if PAIR == 1:
        low = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (words << 16).to(tl.float32, bitcast=True)
        high = (words & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def _scales(  # noqa: PLR0917
    scale,
    more,
    outer,
    group,
    column,
    outputs,
    PAIR: tl.constexpr,
    SECOND: tl.constexpr,
    UNIT: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """Return a group's factor and addend of each output, `[COLUMNS]` float32."""
    exists = column < outputs
    place = group * outputs + column
    if PAIR == 0:
        own = tl.load(scale + place, mask=exists, other=0.0)
        second = own
        if SECOND != 0:
            second = tl.load(more + place, mask=exists, other=0.0)
    else:
        own, second = _halves(tl.load(scale + place, mask=exists, other=0), PAIR)
    if UNIT > 1:
        words = tl.load(outer + group // UNIT * outputs + column, mask=exists, other=0)
        outer_scale, outer_offset = _halves(words, 1)
        own *= outer_scale
        second *= outer_offset
    if SECOND == 0:
        addend = -ZERO_POINT * own
    elif SECOND == 1:
        addend = -(ZERO_POINT + second) * own
    else:
        addend = second - ZERO_POINT * own
    return own * FACTOR, addend


@triton.jit
def _weights(  # noqa: PLR0917
    words, PLACE: tl.constexpr, KIND: tl.constexpr, factor, addend, ADDS: tl.constexpr
):
    """Return the weights `[COLUMNS, WORDS]` of the numbers at a place of the words."""
    found = _numbers(words, PLACE, KIND) * factor[:, None]
    return found + addend[:, None] if ADDS else found


@triton.jit(do_not_specialize=["rows", "per_split"])
def _linear_kernel(  # noqa: PLR0917
    x,
    codes,
    scale,
    more,
    outer,
    bias,
    out,
    rows,
    inputs,
    outputs,
    depth,  # iterations that all inputs take
    per_split,  # those of a part
    row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,  # numbers of a word
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,  # consecutive inputs that are always of one group
    UNIT: tl.constexpr,
    PAIR: tl.constexpr,
    SECOND: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
    ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr,  # not of parts, to whose sum it is added
    UPCAST: tl.constexpr,  # multiply in float32, whatever the operands' dtype
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    split = tl.program_id(2)
    begin = split * per_split
    end = tl.minimum(begin + per_split, depth)
    word = tl.arange(0, WORDS)
    from_codes = codes + column.to(tl.int64)[:, None] * (depth * WORDS) + word[None, :]
    from_rows = x + row[None, :] * row_stride + word[:, None]
    exists = (column < outputs)[:, None]
    real = (row < rows)[None, :]
    total = tl.zeros((COLUMNS, ROWS), tl.float32)
    for step in range(begin, end):
        words = tl.load(from_codes + step * WORDS, mask=exists, other=0)
        for place in tl.static_range(PLACES):
            first = (step * PLACES + place) * WORDS
            if place * WORDS % SHARED == 0:
                factor, addend = _scales(
                    *(scale, more, outer, first // GROUP, column, outputs),
                    *(PAIR, SECOND, UNIT, ZERO_POINT, FACTOR),
                )
            weights = _weights(words, place, KIND, factor, addend, ADDS)
            known = real & (first + word < inputs)[:, None]
            these = tl.load(from_rows + first, mask=known, other=0.0)
            weights = weights.to(these.dtype)
            if UPCAST:
                these, weights = these.to(tl.float32), weights.to(tl.float32)
            total = tl.dot(weights, these, total, input_precision="ieee")
    if HAS_BIAS:
        own_bias = tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)
        total += own_bias[:, None]
    to = out + (split.to(tl.int64) * rows + row[None, :]) * outputs + column[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=exists & real)


@triton.jit(do_not_specialize=["rows"])
def _merge_kernel(  # noqa: PLR0917
    parts, bias, out, rows, outputs, splits, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add up the parts of a row, `[splits, rows, outputs]`, and the bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < outputs
    total = tl.zeros((COLUMNS,), tl.float32)
    for split in range(splits):
        place = (split * rows + row) * outputs + column
        total += tl.load(parts + place, mask=exists, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + column, total.to(out.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["first_output", "last_output"])
def _dequantize_kernel(  # noqa: PLR0917
    codes,
    scale,
    more,
    outer,
    out,
    first_output,
    last_output,
    inputs,
    outputs,
    depth,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    UNIT: tl.constexpr,
    PAIR: tl.constexpr,
    SECOND: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Write the weights of some outputs, `[last_output - first_output, inputs]`."""
    line = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column = first_output + line
    step = tl.program_id(1)
    exists = (column < last_output)[:, None]
    word = tl.arange(0, WORDS)[None, :]
    from_codes = codes + column.to(tl.int64)[:, None] * (depth * WORDS) + step * WORDS + word
    words = tl.load(from_codes, mask=exists, other=0)
    to = out + line.to(tl.int64)[:, None] * inputs + word
    for place in tl.static_range(PLACES):
        first = (step * PLACES + place) * WORDS
        if place * WORDS % SHARED == 0:
            factor, addend = _scales(
                *(scale, more, outer, first // GROUP, column, outputs),
                *(PAIR, SECOND, UNIT, ZERO_POINT, FACTOR),
            )
        weights = _weights(words, place, KIND, factor, addend, ADDS)
        known = exists & (first + word < inputs)
        tl.store(to + first, weights.to(out.dtype.element_ty), mask=known)


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply by quantized weights; see `octavo.kernels.ops.quantized_linear`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows = len(x)
    out = torch.empty((rows, weight.outputs), dtype=dtype, device=x.device)
    if rows >= MANY_ROWS:
        _multiply_dequantized(x, weight, bias, out)
    elif rows:
        _multiply_unpacked(x, weight, bias, out)
    return out


def _multiply_unpacked(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor
) -> None:
    rows, outputs = out.shape
    depth = _depth(weight)
    tiles = choose_linear_tiles(describe_gpu(x.device), rows, weight, x.dtype)
    per_split = triton.cdiv(depth, tiles.splits)
    splits = triton.cdiv(depth, per_split)
    to = out
    if splits > 1:
        to = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(outputs, tiles.columns), triton.cdiv(rows, tiles.rows), splits)
    _linear_kernel[grid](
        *(x, *_tensors(weight), bias, to, rows, weight.inputs, outputs, depth, per_split),
        x.stride(0),
        ROWS=tiles.rows,
        COLUMNS=tiles.columns,
        HAS_BIAS=bias is not None and splits == 1,
        UPCAST=x.device.type == "cpu",
        **constants_of(weight),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        _merge_kernel[(rows, triton.cdiv(outputs, MERGED_COLUMNS))](
            *(to, bias, out, rows, outputs, splits),
            HAS_BIAS=bias is not None,
            COLUMNS=MERGED_COLUMNS,
        )


def _multiply_dequantized(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor
) -> None:
    depth = _depth(weight)
    most = max(1, DEQUANTIZED_BYTES // (weight.inputs * x.itemsize))
    made = x.new_empty((min(most, weight.outputs), weight.inputs))
    for first in range(0, weight.outputs, most):
        last = min(first + most, weight.outputs)
        own = made[: last - first]
        _dequantize_kernel[(triton.cdiv(last - first, DEQUANTIZED_COLUMNS), depth)](
            *(*_tensors(weight), own, first, last, weight.inputs, weight.outputs, depth),
            COLUMNS=DEQUANTIZED_COLUMNS,
            **constants_of(weight),
        )
        if x.dtype == out.dtype or x.device.type == "cpu":
            out[:, first:last] = torch.mm(x, own.t())
        else:
            out[:, first:last] = torch.mm(x, own.t(), out_dtype=out.dtype)
    if bias is not None:
        out += bias


def _depth(weight: QuantizedWeight) -> int:
    """Return the iterations that all inputs take."""
    return weight.codes.shape[1] // WORDS


def _tensors(weight: QuantizedWeight) -> tuple[Tensor | None, ...]:
    """Return a weight's tensors in the order of the kernels' arguments."""
    return weight.codes, weight.scale, weight.more, weight.outer


def constants_of(weight: QuantizedWeight) -> dict[str, Any]:
    """Return what kernels are compiled for, by a weight."""
    zero_point = _BIAS.get(weight.numbers, 0)
    if weight.second != Second.ZERO_POINT:
        zero_point += weight.zero_point
    return {
        "WORDS": WORDS,
        "PLACES": weight.numbers.per_word,
        "KIND": weight.numbers.value,
        "GROUP": weight.group,
        "SHARED": math.gcd(weight.group, weight.numbers.tile),
        "UNIT": weight.unit,
        "PAIR": 0 if weight.pair is None else 1 + PAIRS.index(weight.pair),
        "SECOND": weight.second.value,
        "ZERO_POINT": float(zero_point),
        "FACTOR": _FACTOR.get(weight.numbers, 1.0),
        "ADDS": zero_point != 0 or weight.second != Second.NOTHING,
    }
