"""The scan of Mamba-2 layers (SSD), a chunk of tokens at a time; see `chunks.py`."""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.state_rows import StateRows
from octavo.kernels.triton.chunks import (
    CHUNK,
    FACTORS,
    WARPS,
    chunk_arguments,
    chunk_grid,
    find_chunk,
    padded_size,
    product,
    scan,
    shared_constants,
    spans,
)
from octavo.kernels.triton.state_rows import step_of


@triton.jit(do_not_specialize=["num_seqs"])
def prepare_ssd_kernel(  # noqa: PLR0917
    dt,
    a,
    b,
    c,
    dt_bias,
    mixing,
    factors,
    query_starts,
    seq_lens,
    num_seqs,
    b_stride,
    c_stride,
    dt_stride,
    least_dt,
    greatest_dt,
    STATE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,  # heads that share b and c
    PADDED_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
    SEQS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Grid: heads, chunks."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    first, end = find_chunk(tl.program_id(1), query_starts, seq_lens, num_seqs, CHUNK, FEW, SEQS)
    if first < end:
        token = tl.arange(0, CHUNK)
        element = tl.arange(0, PADDED_SIZE)
        row = first.to(tl.int64) + token
        real = row < end
        known = real[:, None] & (element < STATE_SIZE)[None, :]
        group = head // GROUP * STATE_SIZE
        own_b = tl.load(b + row[:, None] * b_stride + group + element[None, :], mask=known, other=0)
        own_c = tl.load(c + row[:, None] * c_stride + group + element[None, :], mask=known, other=0)
        bias = tl.load(dt_bias + head).to(tl.float32) if HAS_BIAS else 0.0
        step = tl.load(dt + row * dt_stride + head, mask=real, other=0.0)
        step = tl.where(real, step_of(step, least_dt, greatest_dt, bias, SOFTPLUS), 0.0)
        decays, into, onto = spans(tl.load(a + head).to(tl.float32) * step, CHUNK)
        weights = product(own_c, tl.trans(own_b), UPCAST)
        weights *= tl.exp(decays) * step[None, :]
        weights = tl.where(token[:, None] >= token[None, :], weights, 0.0)
        number = row * heads + head
        matrix = number[:, None] * CHUNK + token[None, :]
        tl.store(mixing + matrix, weights, mask=real[:, None])
        to = factors + number * FACTORS
        tl.store(to, tl.exp(into), mask=real)
        tl.store(to + 1, tl.exp(onto) * step, mask=real)
        tl.store(to + 2, tl.exp(into), mask=real)


def compute_ssd_chunks(  # noqa: PLR0917
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    d: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limits: tuple[float, float],
) -> None:
    """Compute the sequences of more than `chunks.FEW` tokens; see `octavo.kernels.states`.

    The arguments are those of `ssd`, with `out` for the results. All tensors are contiguous, but
    for the tokens of x, dt, b and c.
    """
    groups, state_size = b.shape[1:]
    num_tokens, heads = dt.shape
    mixing = x.new_empty((num_tokens, heads, CHUNK), dtype=torch.float32)
    factors = mixing.new_empty((num_tokens, heads, FACTORS.value))
    prepare_ssd_kernel[chunk_grid(heads, num_tokens, rows)](
        *(dt, a, b, c, dt_bias, mixing, factors),
        **chunk_arguments(rows),
        b_stride=b.stride(0),
        c_stride=c.stride(0),
        dt_stride=dt.stride(0),
        least_dt=dt_limits[0],
        greatest_dt=dt_limits[1],
        STATE_SIZE=state_size,
        GROUP=heads // groups,
        PADDED_SIZE=padded_size(state_size),
        HAS_BIAS=dt_bias is not None,
        SOFTPLUS=dt_softplus,
        **shared_constants(x.device),
        num_warps=WARPS,
    )
    scan(c, b, x, mixing, factors, rows, out, skip=d, keys_first=False)
