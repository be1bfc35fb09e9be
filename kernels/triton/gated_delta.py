"""The gated delta rule: one program per sequence, head and tile of the head's values.

A program keeps its part of the state in registers and takes one token after the other, so a state
is read once and written once, however long the chunk. Columns of the state, one per value, do not
depend on each other. Sequences of more tokens than `chunks.FEW` are computed in chunks instead
(`delta_chunks`), if their decays are the same for all elements of a key.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import describe_gpu
from octavo.kernels.reference_states import EPSILON
from octavo.kernels.state_rows import StateRows
from octavo.kernels.triton.chunks import ANY, FEW, fits_chunks
from octavo.kernels.triton.delta_chunks import compute_delta_chunks
from octavo.kernels.triton.ssd import dense_tokens
from octavo.kernels.triton.state_rows import place_of, row_arguments, tokens_of

ELEMENTS = 1024  # elements of a state per program
MIN_VALUES = 8  # values of a program; adjacent in memory
WARPS = 1  # sums over keys need no shared memory


@triton.jit(do_not_specialize=["first_row"])
def gated_delta_kernel(  # noqa: PLR0917
    query,
    key,
    value,
    g,
    beta,
    out,
    state,
    tables,
    query_starts,
    seq_lens,
    query_stride,
    key_stride,
    value_stride,
    table_stride,
    block_stride,
    row_size,
    first_row,
    rows_per_block,
    scale,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads that share a key head
    PADDED_KEY: tl.constexpr,
    VALUES: tl.constexpr,  # per program
    EPSILON: tl.constexpr,
    DECAYS: tl.constexpr,  # elements of g per head
    ELEMENTWISE: tl.constexpr,  # whether g has one element per key element
    NORMALIZE: tl.constexpr,
    MOST: tl.constexpr,  # maximum tokens of a sequence that this kernel computes
):
    """Grid: value heads, tiles of values, sequences."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    seq = tl.program_id(2)
    first, end, has_state = tokens_of(seq, query_starts, seq_lens)
    if (first < end) & (end - first <= MOST):
        element = tl.arange(0, PADDED_KEY)
        column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
        real_key = element < KEY_DIM
        real_value = column < VALUE_DIM
        real = real_key[:, None] & real_value[None, :]
        place = place_of(
            seq, head, True, tables, table_stride, block_stride, row_size, first_row,
            rows_per_block,
        )  # fmt: skip
        at = state + place + element[:, None] * VALUE_DIM + column[None, :]
        old = column < VALUE_DIM * has_state
        s = tl.load(at, mask=real_key[:, None] & old[None, :], other=0.0)
        start = first.to(tl.int64)
        query_at = query + start * query_stride + head // GROUP * KEY_DIM + element
        key_at = key + start * key_stride + head // GROUP * KEY_DIM + element
        value_at = value + start * value_stride + head * VALUE_DIM + column
        out_at = out + (start * heads + head) * VALUE_DIM + column
        beta_at = beta + start * heads + head
        decays = g + (start * heads + head) * DECAYS
        if ELEMENTWISE:
            decays += element
        for _ in range(first, end):
            q = tl.load(query_at, mask=real_key, other=0.0).to(tl.float32)
            k = tl.load(key_at, mask=real_key, other=0.0).to(tl.float32)
            v = tl.load(value_at, mask=real_value, other=0.0).to(tl.float32)
            if NORMALIZE:
                q = q / tl.sqrt(tl.sum(q * q, 0) + EPSILON)
                k = k / tl.sqrt(tl.sum(k * k, 0) + EPSILON)
            if ELEMENTWISE:
                decay = tl.load(decays, mask=real_key, other=0.0)
                s = s * tl.exp(decay.to(tl.float32))[:, None]
            else:
                s = s * tl.exp(tl.load(decays).to(tl.float32))
            known = tl.sum(s * k[:, None], 0)
            change = tl.load(beta_at).to(tl.float32) * (v - known)
            s += k[:, None] * change[None, :]
            result = tl.sum(s * (q * scale)[:, None], 0)
            tl.store(out_at, result.to(out.dtype.element_ty), mask=real_value)
            query_at += query_stride
            key_at += key_stride
            value_at += value_stride
            out_at += heads * VALUE_DIM
            beta_at += heads
            decays += heads * DECAYS
        tl.store(at, s, mask=real)


def gated_delta(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: StateRows,
    *,
    scale: float,
    normalize: bool = False,
) -> Tensor:
    """Compute the gated delta rule; see `octavo.kernels.states`."""
    query, key, value = map(dense_tokens, (query, key, value))
    _, key_heads, key_dim = key.shape
    heads, value_dim = value.shape[1:]
    padded = triton.next_power_of_2(key_dim)
    values = min(max(ELEMENTS // padded, MIN_VALUES), triton.next_power_of_2(value_dim))
    g, beta = g.contiguous(), beta.contiguous()
    out = torch.zeros_like(value, memory_format=torch.contiguous_format)
    elementwise = g.dim() == 3
    in_chunks = not elementwise and fits_chunks(
        describe_gpu(value.device), value.dtype, key_dim, delta=True
    )
    if in_chunks and rows.max_query_len > FEW:
        compute_delta_chunks(
            query, key, value, g, beta, rows, out, scale=scale, normalize=normalize
        )
        if len(rows.seq_lens) == 1:
            return out
    gated_delta_kernel[heads, triton.cdiv(value_dim, values), len(rows.seq_lens)](
        query,
        key,
        value,
        g,
        beta,
        out,
        query_stride=query.stride(0),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        **row_arguments(rows),
        scale=scale,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        GROUP=heads // key_heads,
        PADDED_KEY=padded,
        VALUES=values,
        EPSILON=EPSILON,
        DECAYS=key_dim if elementwise else 1,
        ELEMENTWISE=elementwise,
        NORMALIZE=normalize,
        MOST=FEW if in_chunks else ANY,
        num_warps=WARPS,
    )
    return out
