"""Mixtures of experts with quantized weights, which grouped products unpack.

All but the products is as in experts.py. A tile of a gated product alternates gates and up
projections: so it is one ordinary product, which yields both outputs of each pair.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.activation import Activation
from octavo.kernels.gpu import describe_gpu
from octavo.kernels.quantized import QuantizedWeight
from octavo.kernels.triton.expert_rows import activate, add_up, find_rows, max_tiles, sort_pairs
from octavo.kernels.triton.unpack import (
    choose_unpacked_tiles,
    constants_of,
    depth_of,
    multiply_unpacked,
    tensors_of,
)


@triton.jit(do_not_specialize=["depth"])
def _up_kernel(  # noqa: PLR0917
    x,
    order,
    starts,
    codes,
    scale,
    more,
    outer,
    bias,
    out,
    hidden,
    inner,
    outputs,  # number for all experts
    depth,
    row_stride,
    CHOSEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,  # next power of two
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
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
):
    expert, begin, end = find_rows(starts, tl.program_id(0), NUM_EXPERTS, PADDED, ROWS)
    if begin < end:
        row = begin + tl.arange(0, ROWS)
        real = row < end
        token = tl.load(order + row, mask=real, other=0) // CHOSEN
        output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        if GATED:
            exists = output // 2 < inner
            column = (2 * expert + output % 2) * inner + output // 2
        else:
            exists = output < inner
            column = expert * inner + output
        from_rows = x + token.to(tl.int64) * row_stride
        total = multiply_unpacked(
            *(from_rows, codes, scale, more, outer, column, exists, real, hidden, outputs),
            *(depth, 0, depth, ROWS, COLUMNS, WORDS, PLACES, KIND, GROUP, SHARED, UNIT, SCALES),
            *(SECOND, ZERO_POINT, FACTOR, ADDS, UPCAST),
        )
        if HAS_BIAS:
            total += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)[:, None]
        if GATED:
            pairs = tl.permute(tl.reshape(total, (COLUMNS // 2, 2, ROWS)), (0, 2, 1))
            gate, up = tl.split(pairs)
            if LIMIT > 0:
                gate = tl.minimum(gate, LIMIT)
                up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
            result = activate(gate, ACTIVATION, ALPHA) * (up + OFFSET)
            place = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        else:
            result = activate(total, ACTIVATION, ALPHA)
            place = output
        to = out + row.to(tl.int64)[None, :] * inner + place[:, None]
        known = real[None, :] & (place < inner)[:, None]
        tl.store(to, result.to(out.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["depth"])
def _down_kernel(  # noqa: PLR0917
    between,
    order,
    starts,
    codes,
    scale,
    more,
    outer,
    bias,
    shares,
    out,
    inner,
    hidden,
    outputs,
    depth,
    NUM_EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
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
    UPCAST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    expert, begin, end = find_rows(starts, tl.program_id(0), NUM_EXPERTS, PADDED, ROWS)
    if begin < end:
        row = begin + tl.arange(0, ROWS)
        real = row < end
        pair = tl.load(order + row, mask=real, other=0)
        output = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        exists = output < hidden
        column = expert * hidden + output
        from_rows = between + row.to(tl.int64) * inner
        total = multiply_unpacked(
            *(from_rows, codes, scale, more, outer, column, exists, real, inner, outputs),
            *(depth, 0, depth, ROWS, COLUMNS, WORDS, PLACES, KIND, GROUP, SHARED, UNIT, SCALES),
            *(SECOND, ZERO_POINT, FACTOR, ADDS, UPCAST),
        )
        if HAS_BIAS:
            total += tl.load(bias + column, mask=exists, other=0.0).to(tl.float32)[:, None]
        total *= tl.load(shares + pair, mask=real, other=0.0)[None, :]
        to = out + pair.to(tl.int64)[None, :] * hidden + output[:, None]
        tl.store(to, total, mask=exists[:, None] & real[None, :])


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
    """Compute a mixture of experts; see `octavo.kernels.ops.quantized_experts`."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    num_rows, hidden = x.shape
    out = torch.empty((num_rows, hidden), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    inner, num_experts, chosen = down.inputs, down.outputs // hidden, expert_ids.shape[1]
    expert_ids = expert_ids.contiguous()
    num_pairs = num_rows * chosen
    order, starts = sort_pairs(expert_ids, num_experts)
    gpu, mean = describe_gpu(x.device), num_pairs / num_experts
    between = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    pairs = torch.empty((num_pairs, hidden), dtype=torch.float32, device=x.device)
    shared = {
        "NUM_EXPERTS": num_experts,
        "PADDED": triton.next_power_of_2(num_experts),
        "UPCAST": x.device.type == "cpu",
    }
    tiles = choose_unpacked_tiles(gpu, mean, up, x.dtype)
    projected = up.outputs // num_experts
    grid = (max_tiles(num_pairs, num_experts, tiles.rows), triton.cdiv(projected, tiles.columns))
    _up_kernel[grid](
        *(x, order, starts, *tensors_of(up), _contiguous(up_bias), between),
        *(hidden, inner, up.outputs, depth_of(up), x.stride(0)),
        CHOSEN=chosen,
        HAS_BIAS=up_bias is not None,
        GATED=activation.gated,
        ACTIVATION=activation.number,
        ALPHA=activation.alpha,
        LIMIT=activation.limit,
        OFFSET=activation.offset,
        **shared,
        **constants_of(up),
        **tiles.launch,
    )
    tiles = choose_unpacked_tiles(gpu, mean, down, x.dtype)
    grid = (max_tiles(num_pairs, num_experts, tiles.rows), triton.cdiv(hidden, tiles.columns))
    _down_kernel[grid](
        *(between, order, starts, *tensors_of(down), _contiguous(down_bias)),
        *(weights.float().contiguous(), pairs, inner, hidden, down.outputs, depth_of(down)),
        HAS_BIAS=down_bias is not None,
        **shared,
        **constants_of(down),
        **tiles.launch,
    )
    add_up(pairs, expert_ids, num_experts, out)
    return out


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()
