"""Addresses of a program's sequence and of its state in a stateful layer."""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math
from typing import Any

import triton
import triton.language as tl

from octavo.kernels.state_rows import StateRows


@triton.jit
def tokens_of(seq, query_starts, seq_lens):
    """Return begin and end of a sequence's tokens, and 1 if the kernel must read its state.

    Padding has no tokens; a sequence that starts in this step has no state.
    """
    first = tl.load(query_starts + seq)
    end = tl.load(query_starts + seq + 1)
    seq_len = tl.load(seq_lens + seq)
    has_state = tl.where(seq_len == end - first, 0, 1)
    end = tl.where(seq_len > 0, end, first)
    return first, end, has_state


@triton.jit
def place_of(  # noqa: PLR0917
    seq, row, real, tables, table_stride, block_stride, row_size, first_row, rows_per_block
):
    """Return the offsets of rows of a sequence's state in the cache, in elements."""
    place = first_row + row
    block = tl.load(tables + seq * table_stride + place // rows_per_block, mask=real, other=0)
    return block.to(tl.int64) * block_stride + (place % rows_per_block) * row_size


@triton.jit
def step_of(dt, least, greatest, bias, SOFTPLUS: tl.constexpr):
    """Return the step sizes of a state space model from the projection, float32."""
    dt = dt.to(tl.float32) + bias
    if SOFTPLUS:
        u = tl.exp(-tl.abs(dt))
        rounded = 1.0 + u
        # log(1 + u) without the error of rounding 1 + u (Kahan).
        ratio = tl.log(rounded) / tl.where(rounded == 1.0, 1.0, rounded - 1.0)
        dt = tl.maximum(dt, 0.0) + tl.where(rounded == 1.0, u, u * ratio)
    return tl.minimum(tl.maximum(dt, least), greatest)


def row_arguments(rows: StateRows) -> dict[str, Any]:
    """Return a kernel's arguments that describe the rows."""
    return {
        "state": rows.state,
        "tables": rows.tables,
        "query_starts": rows.query_starts,
        "seq_lens": rows.seq_lens,
        "table_stride": rows.tables.stride(0),
        "block_stride": rows.state.stride(0),
        "row_size": math.prod(rows.state.shape[2:]),
        "first_row": rows.first_row,
        "rows_per_block": rows.state.shape[1],
    }
