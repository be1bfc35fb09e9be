"""Mixtures of experts: grouped products over rows sorted by expert.

The first kernel multiplies an expert's rows by its gate and up projections and applies the
activation. The second multiplies the result by the down projection and the rows' weights.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation import Activation
from octavo.kernels.gpu import Gpu, describe_gpu
from octavo.kernels.triton.expert_rows import activate, add_up, find_rows, max_tiles, sort_pairs
from octavo.kernels.triton.tiles import WIDE_WARP


class ExpertTiles(NamedTuple):
    """The sizes of a program's tiles.

    Attributes:
        rows: Rows of an expert.
        columns: Outputs of an expert; if gated, gates and as many up projections.
        depth: Inputs of an iteration.
        warps: Warps of a program.
        stages: Iterations in flight.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def choose_expert_tiles(gpu: Gpu, rows: float) -> ExpertTiles:
    """Return the tiles for a GPU.

    An iteration of a gated product loads 24 KiB for 64 rows and twice 64 outputs: 43 operations for
    each byte. At the 5.5 TB/s of an H100's L2 that is 235 TFLOP/s, of the 989 of its matrix units.
    With 128 rows and twice 128 outputs it is 85 operations for each byte; registers of other GPUs
    hold half as many outputs, and 64. Experts have more rows than such a tile on average, so
    little of it is padding.

    Args:
        gpu: The GPU.
        rows: The mean number of rows of an expert. With few rows, programs wait for weights, and
            narrow tiles keep more multiprocessors busy.
    """
    stages = 2 if gpu.is_amd else 3
    narrow = gpu.is_amd and gpu.warp_size < WIDE_WARP
    if rows <= 16:
        return ExpertTiles(16, 32, 64 if narrow else 128, 4, stages)  # 128 would spill registers
    if rows <= 32:
        return ExpertTiles(32, 64, 64, 4, stages)
    if rows > 128 and not gpu.is_amd:
        in_flight = 3 if gpu.shared_bytes > 128 << 10 else 2
        return ExpertTiles(128, 128 if gpu.multiplies_in_place else 64, 64, 8, in_flight)
    return ExpertTiles(64, 64, 64, 8 if narrow else 4, stages)


@triton.jit
def _multiply_add(rows, weights, total, UPCAST: tl.constexpr):
    if UPCAST:
        rows, weights = rows.to(tl.float32), weights.to(tl.float32)
    return tl.dot(rows, weights, total)


@triton.jit
def _up_kernel(  # noqa: PLR0917
    x,
    order,
    starts,
    weights,
    bias,
    out,
    hidden,
    inner,
    row_stride,
    expert_stride,
    output_stride,
    input_stride,
    bias_stride,
    CHOSEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # next power of two
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    UPCAST: tl.constexpr,  # multiply in float32, whatever the operands' dtype
):
    expert, begin, end = find_rows(starts, tl.program_id(0), NUM_EXPERTS, PADDED, ROWS)
    if begin < end:
        row = begin + tl.arange(0, ROWS)
        real = row < end
        token = tl.load(order + row, mask=real, other=0) // CHOSEN
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        exists = column < inner
        k = tl.arange(0, DEPTH)
        from_rows = x + token.to(tl.int64)[:, None] * row_stride + k[None, :]
        from_weights = weights + expert.to(tl.int64) * expert_stride
        from_weights += k[:, None] * input_stride + column[None, :] * output_stride
        gate = tl.zeros([ROWS, COLUMNS], tl.float32)
        up = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, hidden, DEPTH):
            inside = k < hidden - start
            rows = tl.load(from_rows, mask=real[:, None] & inside[None, :], other=0.0)
            known = inside[:, None] & exists[None, :]
            gate = _multiply_add(rows, tl.load(from_weights, mask=known, other=0.0), gate, UPCAST)
            if GATED:
                others = tl.load(from_weights + inner * output_stride, mask=known, other=0.0)
                up = _multiply_add(rows, others, up, UPCAST)
            from_rows += DEPTH
            from_weights += DEPTH * input_stride
        if HAS_BIAS:
            from_bias = bias + expert * bias_stride + column
            gate += tl.load(from_bias, mask=exists, other=0.0).to(tl.float32)[None, :]
            if GATED:
                up += tl.load(from_bias + inner, mask=exists, other=0.0).to(tl.float32)[None, :]
        if GATED:
            if LIMIT > 0:
                gate = tl.minimum(gate, LIMIT)
                up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            result = activate(gate, KIND, ALPHA) * (up + OFFSET)
        else:
            result = activate(gate, KIND, ALPHA)
        to = out + row.to(tl.int64)[:, None] * inner + column[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=real[:, None] & exists[None, :])


@triton.jit
def _down_kernel(  # noqa: PLR0917
    between,
    order,
    starts,
    weights,
    bias,
    shares,
    out,
    inner,
    hidden,
    expert_stride,
    output_stride,
    input_stride,
    bias_stride,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    expert, begin, end = find_rows(starts, tl.program_id(0), NUM_EXPERTS, PADDED, ROWS)
    if begin < end:
        row = begin + tl.arange(0, ROWS)
        real = row < end
        pair = tl.load(order + row, mask=real, other=0)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        exists = column < hidden
        k = tl.arange(0, DEPTH)
        from_rows = between + row.to(tl.int64)[:, None] * inner + k[None, :]
        from_weights = weights + expert.to(tl.int64) * expert_stride
        from_weights += k[:, None] * input_stride + column[None, :] * output_stride
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for start in range(0, inner, DEPTH):
            inside = k < inner - start
            rows = tl.load(from_rows, mask=real[:, None] & inside[None, :], other=0.0)
            known = inside[:, None] & exists[None, :]
            total = _multiply_add(rows, tl.load(from_weights, mask=known, other=0.0), total, UPCAST)
            from_rows += DEPTH
            from_weights += DEPTH * input_stride
        if HAS_BIAS:
            from_bias = bias + expert * bias_stride + column
            total += tl.load(from_bias, mask=exists, other=0.0).to(tl.float32)[None, :]
        total *= tl.load(shares + pair, mask=real, other=0.0)[:, None]
        to = out + pair.to(tl.int64)[:, None] * hidden + column[None, :]
        tl.store(to, total, mask=real[:, None] & exists[None, :])


def experts(  # noqa: PLR0917
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    """Compute a mixture of experts; see `octavo.kernels.reference.experts`.

    Args:
        x: `[rows, hidden]` bfloat16 or float16.
        expert_ids: `[rows, chosen]` int64; those that do not exist are skipped.
        weights: `[rows, chosen]`.
        up: `[experts, projected, hidden]` of any strides, so it may be a transposed view.
        up_bias: `[experts, projected]`, or None.
        down: `[experts, hidden, inner]` of any strides.
        down_bias: `[experts, hidden]`, or None.
        activation: Maps `[projected]` to `[inner]`.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, hidden = x.shape
    num_experts, inner, chosen = down.shape[0], down.shape[2], expert_ids.shape[1]
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    expert_ids = expert_ids.contiguous()
    num_pairs = num_rows * chosen
    order, starts = sort_pairs(expert_ids, num_experts)
    tiles = choose_expert_tiles(describe_gpu(x.device), num_pairs / num_experts)
    row_tiles = max_tiles(num_pairs, num_experts, tiles.rows)
    between = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    pairs = torch.empty((num_pairs, hidden), dtype=torch.float32, device=x.device)
    launch = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    shared = {
        "NUM_EXPERTS": num_experts,
        "PADDED": triton.next_power_of_2(num_experts),
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "DEPTH": tiles.depth,
        "UPCAST": x.device.type == "cpu",
    }
    _up_kernel[(row_tiles, triton.cdiv(inner, tiles.columns))](
        *(x, order, starts, up, up_bias, between, hidden, inner, x.stride(0), *up.stride()),
        0 if up_bias is None else up_bias.stride(0),
        CHOSEN=chosen,
        HAS_BIAS=up_bias is not None,
        GATED=activation.gated,
        KIND=activation.number,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        OFFSET=activation.offset,
        **shared,
        **launch,
    )
    _down_kernel[(row_tiles, triton.cdiv(hidden, tiles.columns))](
        *(between, order, starts, down, down_bias, weights.float().contiguous(), pairs),
        *(inner, hidden, *down.stride(), 0 if down_bias is None else down_bias.stride(0)),
        HAS_BIAS=down_bias is not None,
        **shared,
        **launch,
    )
    add_up(pairs, expert_ids, num_experts, out)
    return out
