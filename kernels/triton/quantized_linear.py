"""Linear layers of quantized weights.

Each program computes one tile of rows x outputs over a slice of the inputs. With few rows, the
inputs are split so that every multiprocessor reads weights. A second kernel adds the slices up in
order, so that results are deterministic.

With many rows, arithmetic takes longer than reading. Then the weights are dequantized to memory,
some outputs at a time, and multiplied as usual.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import Gpu, describe_gpu
from octavo.kernels.quantized import QuantizedWeight
from octavo.kernels.triton.unpack import (
    UnpackedTiles,
    choose_unpacked_tiles,
    constants_of,
    depth_of,
    has_wide_tiles,
    multiply_unpacked,
    scales_at,
    tensors_of,
    unpack,
)

DEQUANTIZED_BYTES = 64 << 20
"""Bytes of dequantized weights at a time."""
MIN_DEPTH = 4
"""Minimum iterations over a slice of the inputs."""
MAX_SPLITS = 16
PROGRAMS_EACH = 4
"""Target programs per multiprocessor, so that some read while others compute. Programs of more than
64 rows compute all the time, and their slices are large: they get one."""
MERGED_COLUMNS, DEQUANTIZED_COLUMNS = 512, 64
"""Outputs per program, where programs add slices up or dequantize."""


def many_rows(gpu: Gpu, dtype: torch.dtype) -> int:
    """Return the minimum rows for which weights are dequantized to memory.

    Of each weight of 4 bits that moves 4.5 bytes, and PyTorch's product then gets 75% to 80% of the
    matrix units' rate. Unpacking moves 0.5 bytes, but its instructions leave less of that rate. On
    an H100 (3.35 TB/s, 989 TFLOP/s) 4.5 bytes take as long as 1,300 rows at 55% of the rate instead
    of 75%; on an A100 (2.04 TB/s, 312 TFLOP/s), whose schedulers unpack all the time, as 460 rows
    at 50% instead of 80%. Tiles of 64 rows unpack for two of three cycles.
    """
    if not has_wide_tiles(gpu, dtype):
        return 256
    return 1024 if gpu.multiplies_in_place else 512


def choose_splits(gpu: Gpu, rows: int, weight: QuantizedWeight, tiles: UnpackedTiles) -> int:
    """Return the number of slices that the inputs are split into.

    Args:
        gpu: The GPU.
        rows: The number of rows.
        weight: The weight.
        tiles: The tile sizes.
    """
    programs: int = triton.cdiv(weight.outputs, tiles.columns) * triton.cdiv(rows, tiles.rows)
    wanted: int = triton.cdiv(PROGRAMS_EACH * gpu.multiprocessors, programs)
    if tiles.rows > 64:
        wanted = gpu.multiprocessors // programs
    return max(1, min(wanted, depth_of(weight) // MIN_DEPTH, MAX_SPLITS))


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
    depth,  # iterations over all inputs
    per_split,  # iterations over a slice
    row_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    PLACES: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SHARED: tl.constexpr,
    UNIT: tl.constexpr,
    SCALES: tl.constexpr,
    SECOND: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
    ADDS: tl.constexpr,
    UPCAST: tl.constexpr,  # last constant of the weights: see `multiply_unpacked`
    HAS_BIAS: tl.constexpr,  # none if inputs are split: the sum adds it
):
    # Programs of the same weights are neighbours, so memory is read for the first one only.
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    begin = split * per_split
    end = tl.minimum(begin + per_split, depth)
    exists, real = column < outputs, row < rows
    total = multiply_unpacked(
        *(x + row * row_stride, codes, scale, more, outer, column, exists, real, inputs, outputs),
        *(depth, begin, end, ROWS, COLUMNS, WORDS, PLACES, KIND, GROUP, SHARED, UNIT, SCALES),
        *(SECOND, ZERO_POINT, FACTOR, ADDS, UPCAST),
    )
    if HAS_BIAS:
        own_bias = tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)
        total += own_bias[:, None]
    to = out + (split.to(tl.int64) * rows + row[None, :]) * outputs + column[:, None]
    tl.store(to, total.to(out.dtype.element_ty), mask=exists[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _merge_kernel(  # noqa: PLR0917
    parts, bias, out, rows, outputs, splits, HAS_BIAS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Add up a row's slices, `[splits, rows, outputs]`, and the bias."""
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
    SCALES: tl.constexpr,
    SECOND: tl.constexpr,
    ZERO_POINT: tl.constexpr,
    FACTOR: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Write the weights of some outputs, `[last_output - first_output, inputs]`."""
    line = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column = first_output + line
    step = tl.program_id(1)
    exists = column < last_output
    word = tl.arange(0, WORDS)[None, :]
    from_codes = codes + column.to(tl.int64)[:, None] * (depth * WORDS) + step * WORDS + word
    words = tl.load(from_codes, mask=exists[:, None], other=0)
    to = out + line.to(tl.int64)[:, None] * inputs + word
    for place in tl.static_range(PLACES):
        first = (step * PLACES + place) * WORDS
        if place * WORDS % SHARED == 0:
            factor, addend = scales_at(
                *(scale, more, outer, step, column, exists, outputs, place, WORDS, PLACES),
                *(GROUP, UNIT, SCALES, SECOND, ZERO_POINT, FACTOR),
            )
        weights = unpack(words, place, KIND, factor, addend, ADDS)
        known = exists[:, None] & (first + word < inputs)
        tl.store(to + first, weights.to(out.dtype.element_ty), mask=known)


def quantized_linear(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Multiply by quantized weights; see `octavo.kernels.ops.quantized_linear`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows = len(x)
    out = torch.empty((rows, weight.outputs), dtype=dtype, device=x.device)
    if rows >= many_rows(describe_gpu(x.device), x.dtype):
        _multiply_dequantized(x, weight, bias, out)
    elif rows:
        _multiply_unpacked(x, weight, bias, out)
    return out


def _multiply_unpacked(
    x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor
) -> None:
    rows, outputs = out.shape
    depth = depth_of(weight)
    gpu = describe_gpu(x.device)
    tiles = choose_unpacked_tiles(gpu, rows, weight, x.dtype)
    per_split = triton.cdiv(depth, choose_splits(gpu, rows, weight, tiles))
    splits = triton.cdiv(depth, per_split)
    to = out
    if splits > 1:
        to = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(rows, tiles.rows), triton.cdiv(outputs, tiles.columns), splits)
    _linear_kernel[grid](
        *(x, *tensors_of(weight), bias, to, rows, weight.inputs, outputs, depth, per_split),
        x.stride(0),
        HAS_BIAS=bias is not None and splits == 1,
        UPCAST=x.device.type == "cpu",
        **constants_of(weight),
        **tiles.launch,
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
    depth = depth_of(weight)
    most = max(1, DEQUANTIZED_BYTES // (weight.inputs * x.itemsize))
    made = x.new_empty((min(most, weight.outputs), weight.inputs))
    for first in range(0, weight.outputs, most):
        last = min(first + most, weight.outputs)
        dequantized = made[: last - first]
        _dequantize_kernel[(triton.cdiv(last - first, DEQUANTIZED_COLUMNS), depth)](
            *(*tensors_of(weight), dequantized, first, last, weight.inputs, weight.outputs, depth),
            COLUMNS=DEQUANTIZED_COLUMNS,
            **constants_of(weight),
        )
        if x.dtype == out.dtype or x.device.type == "cpu":
            out[:, first:last] = torch.mm(x, dequantized.t())
        else:
            out[:, first:last] = torch.mm(x, dequantized.t(), out_dtype=out.dtype)
    if bias is not None:
        out += bias
