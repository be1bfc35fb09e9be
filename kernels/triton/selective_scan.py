"""Mamba's selective state space model: one program per sequence and tile of channels.

A program keeps its channels' states in registers and takes one token after the other.

Each element of a channel's state has its own decay. So the tokens of a chunk have no matrix in
common, as Mamba-2's have (`chunks`), and there is nothing for matrix units. For 8,192 tokens and
5,120 channels of 16 elements (Mamba-2.8B) there are 671 million exponentials, which take an H100
0.19 ms, but 80 programs of 8,192 dependent steps. Programs for parts of a prompt would compute all
exponentials twice, as each needs the state before its part.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.state_rows import StateRows
from octavo.kernels.triton.state_rows import place_of, row_arguments, step_of, tokens_of

ELEMENTS = 1024  # elements of states per program
WARPS = 2


@triton.jit(do_not_specialize=["first_row"])
def selective_scan_kernel(  # noqa: PLR0917
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
    channels,
    channels_per_row,
    x_stride,
    dt_stride,
    b_stride,
    c_stride,
    table_stride,
    block_stride,
    row_size,
    first_row,
    rows_per_block,
    least_dt,
    greatest_dt,
    STATE_SIZE: tl.constexpr,
    PADDED_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,  # per program
    HAS_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
):
    """Grid: tiles of channels, sequences."""
    seq = tl.program_id(1)
    first, end, has_state = tokens_of(seq, query_starts, seq_lens)
    if first < end:
        channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        element = tl.arange(0, PADDED_SIZE)
        real_channel = channel < channels
        known = element < STATE_SIZE
        real = real_channel[:, None] & known[None, :]
        place = place_of(
            seq, channel // channels_per_row, real_channel, tables, table_stride, block_stride,
            row_size, first_row, rows_per_block,
        )  # fmt: skip
        place += (channel % channels_per_row) * STATE_SIZE
        at = state + place[:, None] + element[None, :]
        old = element < STATE_SIZE * has_state
        h = tl.load(at, mask=real_channel[:, None] & old[None, :], other=0.0)
        offset = channel[:, None] * STATE_SIZE + element[None, :]
        rates = tl.load(a + offset, mask=real, other=0.0).to(tl.float32)
        bias = tl.zeros([CHANNELS], tl.float32)
        skip = tl.zeros([CHANNELS], tl.float32)
        if HAS_BIAS:
            bias += tl.load(dt_bias + channel, mask=real_channel, other=0.0).to(tl.float32)
        if HAS_D:
            skip += tl.load(d + channel, mask=real_channel, other=0.0).to(tl.float32)
        start = first.to(tl.int64)
        x_at = x + start * x_stride + channel
        dt_at = dt + start * dt_stride + channel
        b_at = b + start * b_stride + element
        c_at = c + start * c_stride + element
        out_at = out + start * channels + channel
        for _ in range(first, end):
            value = tl.load(x_at, mask=real_channel, other=0.0).to(tl.float32)
            step = tl.load(dt_at, mask=real_channel, other=0.0)
            step = step_of(step, least_dt, greatest_dt, bias, SOFTPLUS)
            own_b = tl.load(b_at, mask=known, other=0.0).to(tl.float32)
            own_c = tl.load(c_at, mask=known, other=0.0).to(tl.float32)
            h = h * tl.exp(rates * step[:, None]) + (value * step)[:, None] * own_b[None, :]
            result = tl.sum(h * own_c[None, :], 1) + skip * value
            tl.store(out_at, result.to(out.dtype.element_ty), mask=real_channel)
            x_at += x_stride
            dt_at += dt_stride
            b_at += b_stride
            c_at += c_stride
            out_at += channels
        tl.store(at, h, mask=real)


def selective_scan(  # noqa: PLR0917
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
) -> Tensor:
    """Compute Mamba's selective state space model; see `octavo.kernels.states`."""
    x, dt, b, c = (z if z.stride(1) == 1 else z.contiguous() for z in (x, dt, b, c))
    channels, state_size = a.shape
    padded = triton.next_power_of_2(state_size)
    tile = max(ELEMENTS // padded, 1)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    selective_scan_kernel[triton.cdiv(channels, tile), len(rows.seq_lens)](
        x,
        dt,
        a.contiguous(),
        b,
        c,
        None if d is None else d.contiguous(),
        None if dt_bias is None else dt_bias.contiguous(),
        out,
        channels=channels,
        channels_per_row=rows.state.shape[2],
        x_stride=x.stride(0),
        dt_stride=dt.stride(0),
        b_stride=b.stride(0),
        c_stride=c.stride(0),
        **row_arguments(rows),
        least_dt=-math.inf,
        greatest_dt=math.inf,
        STATE_SIZE=state_size,
        PADDED_SIZE=padded,
        CHANNELS=tile,
        HAS_D=d is not None,
        HAS_BIAS=dt_bias is not None,
        SOFTPLUS=dt_softplus,
        num_warps=WARPS,
    )
    return out
