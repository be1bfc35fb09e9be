"""Convolves each channel over its latest inputs: one program per sequence and tile of channels."""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.state_rows import StateRows
from octavo.kernels.triton.state_rows import place_of, row_arguments, tokens_of

_TOKENS = 16  # loaded at a time
_CHANNELS = 64  # per program


@triton.jit(do_not_specialize=["first_row"])
def causal_conv_kernel(  # noqa: PLR0917
    x,
    weight,
    bias,
    out,
    state,
    tables,
    query_starts,
    seq_lens,
    channels,
    channels_per_row,
    x_stride,
    table_stride,
    block_stride,
    row_size,
    first_row,
    rows_per_block,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,  # the next power of two from WIDTH - 1
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid: sequences, tiles of channels."""
    past: tl.constexpr = WIDTH - 1
    seq = tl.program_id(0)
    first, end, has_state = tokens_of(seq, query_starts, seq_lens)
    if first < end:
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        real = channel < channels
        place = place_of(
            seq, channel // channels_per_row, real, tables, table_stride, block_stride, row_size,
            first_row, rows_per_block,
        )  # fmt: skip
        at = state + place + (channel % channels_per_row) * past
        before = tl.where(has_state == 1, first, -WIDTH)  # the state holds the inputs before it
        for begin in range(first, end, TOKENS):
            token = begin + tl.arange(0, TOKENS)
            total = tl.zeros([TOKENS, CHANNELS], tl.float32)
            for tap in tl.static_range(WIDTH):
                source = token - (past - tap)
                loaded = ((source >= first) & (token < end))[:, None] & real[None, :]
                old = ((source < before) & (token < end))[:, None] & real[None, :]
                from_x = x + channel[None, :] + source[:, None].to(tl.int64) * x_stride
                from_state = at[None, :] + (source - first + past)[:, None]
                value = tl.load(from_x, mask=loaded, other=0.0)
                value += tl.load(from_state, mask=old, other=0.0)
                factor = tl.load(weight + channel * WIDTH + tap, mask=real, other=0.0)
                total += value.to(tl.float32) * factor.to(tl.float32)[None, :]
            if HAS_BIAS:
                total += tl.load(bias + channel, mask=real, other=0.0).to(tl.float32)[None, :]
            if SILU:
                total = total / (1.0 + tl.exp(-total))
            to = out + token[:, None].to(tl.int64) * channels + channel[None, :]
            is_own = (token < end)[:, None] & real[None, :]
            tl.store(to, total.to(out.dtype.element_ty), mask=is_own)
        # The last inputs; some of them may come from the old state.
        slot = tl.arange(0, PADDED_WIDTH)
        source = end - past + slot
        kept = (slot < past)[:, None] & real[None, :]
        loaded = kept & (source >= first)[:, None]
        old = kept & (source < before)[:, None]
        from_x = x + channel[None, :] + source[:, None].to(tl.int64) * x_stride
        value = tl.load(from_x, mask=loaded, other=0.0)
        value += tl.load(at[None, :] + (source - first + past)[:, None], mask=old, other=0.0)
        tl.debug_barrier()  # all threads have read before one overwrites
        tl.store(at[None, :] + slot[:, None], value, mask=kept)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: StateRows,
    *,
    activation: str | None = None,
) -> Tensor:
    """Convolve each channel over its latest inputs; see `octavo.kernels.states`."""
    x = x if x.stride(1) == 1 else x.contiguous()
    channels, width = weight.shape
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    grid = (len(rows.seq_lens), triton.cdiv(channels, _CHANNELS))
    causal_conv_kernel[grid](
        x,
        weight.contiguous(),
        bias,
        out,
        channels=channels,
        channels_per_row=rows.state.shape[2],
        x_stride=x.stride(0),
        **row_arguments(rows),
        WIDTH=width,
        PADDED_WIDTH=triton.next_power_of_2(width - 1),
        TOKENS=_TOKENS,
        CHANNELS=_CHANNELS,
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        num_warps=4,
    )
    return out
