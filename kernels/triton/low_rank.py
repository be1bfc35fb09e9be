"""Low-rank products in two kernels: down to the rank, and up to the outputs.

A program computes a tile of rows of one adapter (see `octavo.kernels.low_rank`). It reads the
addresses of the adapter's matrices from a record, so adapters of any rank share a launch. These are
multiples of 16 bytes, so that a thread loads 16 bytes at once. Programs past an adapter's rank, or
whose adapter does not adapt the layer, end at once.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.low_rank import RECORD, TILE_ROWS, LowRankBatch

RANKS = 16
"""Ranks per iteration, or per program of the first kernel."""
DEPTH = 128
"""Inputs per iteration of the first kernel."""
COLUMNS = 64
"""Outputs per program of the second kernel."""


@triton.jit(do_not_specialize=["max_rank"])
def _down_kernel(  # noqa: PLR0917
    x,
    rows,
    tiles,
    records,
    inner,
    row_stride,
    inputs,
    max_rank,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    RECORD: tl.constexpr,
    UPCAST: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 3
    record = records + tl.load(tile) * RECORD
    rank = tl.load(record + 2)
    k = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    if tl.program_id(1) * RANKS < rank:
        place = tl.load(tile + 1) + tl.arange(0, ROWS)
        real = place < tl.load(tile + 2)
        row = tl.load(rows + place, mask=real, other=0).to(tl.int64)
        matrix = tl.load(record).to(tl.pointer_type(x.dtype.element_ty))
        matrix = tl.multiple_of(matrix, 16)
        total = tl.zeros((ROWS, RANKS), tl.float32)
        for first in range(0, inputs, DEPTH):
            i = first + tl.arange(0, DEPTH)
            row_inputs = tl.load(
                x + row[:, None] * row_stride + i[None, :],
                mask=real[:, None] & (i[None, :] < inputs),
                other=0.0,
            )
            weights = tl.load(
                matrix + k[None, :] * inputs + i[:, None],
                mask=(k[None, :] < rank) & (i[:, None] < inputs),
                other=0.0,
            )
            if UPCAST:
                row_inputs, weights = row_inputs.to(tl.float32), weights.to(tl.float32)
            total = tl.dot(row_inputs, weights, total, input_precision="ieee")
        to = inner + place[:, None].to(tl.int64) * max_rank + k[None, :]
        tl.store(to, total, mask=real[:, None] & (k[None, :] < rank))


@triton.jit(do_not_specialize=["max_rank"])
def _up_kernel(  # noqa: PLR0917
    inner,
    rows,
    tiles,
    records,
    out,
    x,
    row_stride,
    outputs,
    max_rank,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    RECORD: tl.constexpr,
):
    tile = tiles + tl.program_id(0) * 3
    record = records + tl.load(tile) * RECORD
    rank = tl.load(record + 2)
    if rank > 0:
        place = tl.load(tile + 1) + tl.arange(0, ROWS)
        real = place < tl.load(tile + 2)
        row = tl.load(rows + place, mask=real, other=0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        matrix = tl.load(record + 1).to(tl.pointer_type(x.dtype.element_ty))
        matrix = tl.multiple_of(matrix, 16)
        scale = tl.load(record + 3).to(tl.float64, bitcast=True).to(tl.float32)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, rank, RANKS):
            k = first + tl.arange(0, RANKS)
            products = tl.load(
                inner + place[:, None].to(tl.int64) * max_rank + k[None, :],
                mask=real[:, None] & (k[None, :] < rank),
                other=0.0,
            )
            weights = tl.load(
                matrix + k[:, None] * outputs + column[None, :],
                mask=(k[:, None] < rank) & (column[None, :] < outputs),
                other=0.0,
            )
            total = tl.dot(products, weights.to(tl.float32), total, input_precision="ieee")
        to = out + row[:, None] * row_stride + column[None, :]
        mask = real[:, None] & (column[None, :] < outputs)
        before = tl.load(to, mask=mask, other=0.0).to(tl.float32)
        tl.store(to, (before + scale * total).to(out.dtype.element_ty), mask=mask)


def add_low_rank(out: Tensor, x: Tensor, batch: LowRankBatch, layer: int) -> None:
    """Add low-rank products; see `octavo.kernels.ops.add_low_rank`."""
    records, tiles = batch.records[layer], len(batch.tiles)
    inner = torch.empty((len(batch.rows), batch.max_rank), dtype=torch.float32, device=x.device)
    _down_kernel[(tiles, triton.cdiv(batch.max_rank, RANKS))](
        x,
        batch.rows,
        batch.tiles,
        records,
        inner,
        x.stride(0),
        x.shape[1],
        batch.max_rank,
        ROWS=TILE_ROWS,
        RANKS=RANKS,
        DEPTH=DEPTH,
        RECORD=RECORD,
        UPCAST=x.device.type == "cpu",  # the interpreter multiplies in the operands' type
    )
    _up_kernel[(tiles, triton.cdiv(out.shape[1], COLUMNS))](
        inner,
        batch.rows,
        batch.tiles,
        records,
        out,
        x,
        out.stride(0),
        out.shape[1],
        batch.max_rank,
        ROWS=TILE_ROWS,
        RANKS=RANKS,
        COLUMNS=COLUMNS,
        RECORD=RECORD,
    )
