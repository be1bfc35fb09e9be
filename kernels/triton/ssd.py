"""Mamba-2's state space model: one program per sequence, head and tile of the head's rows.

A program keeps its part of the state in registers and takes one token after the other, so a state
is read once and written once, however long the chunk. Sequences of more tokens than `chunks.FEW`
are computed in chunks instead (`ssd_chunks`).
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import describe_gpu
from octavo.kernels.state_rows import StateRows
from octavo.kernels.triton.chunks import ANY, FEW, fits_chunks
from octavo.kernels.triton.ssd_chunks import compute_ssd_chunks
from octavo.kernels.triton.state_rows import place_of, row_arguments, step_of, tokens_of

ELEMENTS = 2048  # elements of a state per program
WARPS = 4


@triton.jit(do_not_specialize=["first_row"])
def ssd_kernel(  # noqa: PLR0917
    x,
    dt,
    a,
    b,
    c,
    d,
    dt_bias,
    out,
    state,
    tables,
    query_starts,
    seq_lens,
    x_stride,
    b_stride,
    c_stride,
    dt_stride,
    table_stride,
    block_stride,
    row_size,
    first_row,
    rows_per_block,
    least_dt,
    greatest_dt,
    HEAD_DIM: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share b and c
    DIMS: tl.constexpr,  # rows of the state per program
    PADDED_SIZE: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    MOST: tl.constexpr,  # maximum tokens of a sequence that this kernel computes
):
    """Grid: heads, tiles of rows, sequences."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    seq = tl.program_id(2)
    first, end, has_state = tokens_of(seq, query_starts, seq_lens)
    if (first < end) & (end - first <= MOST):
        dim = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
        element = tl.arange(0, PADDED_SIZE)
        real_dim = dim < HEAD_DIM
        real = real_dim[:, None] & (element < STATE_SIZE)[None, :]
        place = place_of(
            seq, head, True, tables, table_stride, block_stride, row_size, first_row,
            rows_per_block,
        )  # fmt: skip
        at = state + place + dim[:, None] * STATE_SIZE + element[None, :]
        old = element < STATE_SIZE * has_state
        s = tl.load(at, mask=real_dim[:, None] & old[None, :], other=0.0)
        rate = tl.load(a + head).to(tl.float32)
        bias = tl.load(dt_bias + head).to(tl.float32) if HAS_BIAS else 0.0
        skip = tl.load(d + head).to(tl.float32) if HAS_D else 0.0
        known = element < STATE_SIZE
        start = first.to(tl.int64)
        x_at = x + start * x_stride + head * HEAD_DIM + dim
        b_at = b + start * b_stride + head // GROUP * STATE_SIZE + element
        c_at = c + start * c_stride + head // GROUP * STATE_SIZE + element
        dt_at = dt + start * dt_stride + head
        out_at = out + (start * heads + head) * HEAD_DIM + dim
        for _ in range(first, end):
            step = tl.load(dt_at)
            step = step_of(step, least_dt, greatest_dt, bias, SOFTPLUS)
            value = tl.load(x_at, mask=real_dim, other=0.0).to(tl.float32)
            own_b = tl.load(b_at, mask=known, other=0.0).to(tl.float32)
            own_c = tl.load(c_at, mask=known, other=0.0).to(tl.float32)
            s = s * tl.exp(rate * step) + (value * step)[:, None] * own_b[None, :]
            result = tl.sum(s * own_c[None, :], 1) + skip * value
            tl.store(out_at, result.to(out.dtype.element_ty), mask=real_dim)
            x_at += x_stride
            b_at += b_stride
            c_at += c_stride
            dt_at += dt_stride
            out_at += heads * HEAD_DIM
        tl.store(at, s, mask=real)


def ssd(  # noqa: PLR0917
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    rows: StateRows,
    *,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """Compute Mamba-2's state space model; see `octavo.kernels.states`."""
    x, b, c = map(dense_tokens, (x, b, c))
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    _, heads, head_dim = x.shape
    groups, state_size = b.shape[1:]
    padded = triton.next_power_of_2(state_size)
    dims = min(max(ELEMENTS // padded, 1), triton.next_power_of_2(head_dim))
    a = a.contiguous()
    d = None if d is None else d.contiguous()
    dt_bias = None if dt_bias is None else dt_bias.contiguous()
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    in_chunks = fits_chunks(describe_gpu(x.device), x.dtype, state_size, delta=False)
    if in_chunks and rows.max_query_len > FEW:
        compute_ssd_chunks(
            *(x, dt, a, b, c, rows, out),
            d=d,
            dt_bias=dt_bias,
            dt_softplus=dt_softplus,
            dt_limits=dt_limits,
        )
        if len(rows.seq_lens) == 1:
            return out
    ssd_kernel[heads, triton.cdiv(head_dim, dims), len(rows.seq_lens)](
        x,
        dt,
        a,
        b,
        c,
        d,
        dt_bias,
        out,
        x_stride=x.stride(0),
        b_stride=b.stride(0),
        c_stride=c.stride(0),
        dt_stride=dt.stride(0),
        **row_arguments(rows),
        least_dt=dt_limits[0],
        greatest_dt=dt_limits[1],
        HEAD_DIM=head_dim,
        STATE_SIZE=state_size,
        GROUP=heads // groups,
        DIMS=dims,
        PADDED_SIZE=padded,
        HAS_D=d is not None,
        HAS_BIAS=dt_bias is not None,
        SOFTPLUS=dt_softplus,
        MOST=FEW if in_chunks else ANY,
        num_warps=WARPS,
    )
    return out


def dense_tokens(x: Tensor) -> Tensor:
    """Return a tensor `[num_tokens, heads, dim]` whose tokens are contiguous: itself, or a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
