"""Chunks of tokens of layers that keep states, as products on matrix units.

A recurrence that takes one token at a time needs no matrix unit and waits for each token in turn.
Within a chunk of tokens its results are products (Mamba-2, Dao and Gu 2024, section 6; Gated
DeltaNet, Yang et al. 2024, section 3.3). With keys k, queries q and values u of a chunk, the state
S before it and the decays up to each token, the results and the state after it are

    into * (q @ S) + mixing @ u        and        total * S + k.T @ (onto * u)

where `mixing[i, j]` is the product of query i and key j, decayed from token j to token i. Two
launches compute this:

1. A kernel of the layer's kind prepares each chunk and head, all at once: `mixing`, the factors
   and, for the delta rule, the matrix that makes changes u of values.
2. `scan_kernel`, with a program for each sequence, head and tile of values, takes one chunk after
   the other. The tile of the state stays in registers.

For a prompt of 8,192 tokens, a layer of Mamba-2 2.7B takes 256 dependent steps instead of 8,192,
and Qwen3-Next-80B-A3B's as many. The former multiplies 78 GFLOP of bfloat16 on matrix units, the
latter 82 and 16 of TF32; one token at a time both compute 27 and 30 GFLOP of float32 without them.
They move 366 and 348 MB instead of 177 and 206: `mixing` and the other matrix are written once,
and read by all tiles of values at about the same time.

The papers' kernels write the state before each chunk to memory, to compute all results at once.
For Mamba-2 2.7B and chunks of 64 these are 128 states of 2.6 MB for each layer, written twice and
read twice: 1.3 GB. The scan's 160 programs fill a GPU without. Chunks are of 32 tokens, as the
registers do not hold matrices of 64 x 64 in float32 in the three parts that their products need.

All products are as exact as float32. The inputs are bfloat16, and a number of float32 is the sum
of three bfloat16, so a product of the two is three of bfloat16. Products of float32 are split by
the compiler (`precision_of`). Inputs of other types would all be split, and registers would spill:
such models, wide keys of the delta rule and AMD's consumer GPUs take one token at a time
(`fits_chunks`).
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.kernels.gpu import Gpu, describe_gpu
from octavo.kernels.state_rows import StateRows
from octavo.kernels.triton.state_rows import place_of, row_arguments, tokens_of
from octavo.kernels.triton.tiles import WIDE_WARP

CHUNK = 32
"""Tokens of a chunk."""
WIDEST_KEY = {True: 128, False: 256}
"""Maximum key size of the delta rule, and of layers without it."""
FEW = 16
"""Maximum tokens of a sequence in a step that are taken one by one: two launches take longer."""
ANY = 2**31 - 1
"""A maximum that no sequence exceeds."""
SEQS = 128  # sequences that a program looks up at a time
LEAST = 16  # minimum size of a product's operand
STATE_ELEMENTS = {True: 2048, False: 4096}  # of a program, with and without the delta rule
WARPS = 4
STAGES = 2
FACTORS = tl.constexpr(4)  # numbers of a token and head beside its matrices' rows


@triton.jit
def find_chunk(  # noqa: PLR0917
    index,
    query_starts,
    seq_lens,
    num_seqs,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
    SEQS: tl.constexpr,
):
    """Return first token and end of a batch's chunk; 0 and 0 if there is none of this index.

    Only sequences of more than `FEW` tokens have chunks.
    """
    first = 0
    end = 0
    before = 0
    for begin in range(0, num_seqs, SEQS):
        seq = begin + tl.arange(0, SEQS)
        real = seq < num_seqs
        start = tl.load(query_starts + seq, mask=real, other=0)
        stop = tl.load(query_starts + seq + 1, mask=real, other=0)
        real &= (stop - start > FEW) & (tl.load(seq_lens + seq, mask=real, other=0) > 0)
        chunks = tl.where(real, (stop - start + CHUNK - 1) // CHUNK, 0)
        after = before + tl.cumsum(chunks, 0)
        is_it = (index < after) & (index >= after - chunks)
        at = start + (index - after + chunks) * CHUNK
        first += tl.sum(tl.where(is_it, at, 0), 0)
        end += tl.sum(tl.where(is_it, tl.minimum(at + CHUNK, stop), 0), 0)
        before += tl.sum(chunks, 0)
    return first, end


@triton.jit
def spans(g, CHUNK: tl.constexpr):
    """Return sums of a chunk's logarithms of decays, `[CHUNK]` float32.

    Each sum has its own tokens only. Differences of one running sum would be as inexact as that sum
    is large.

    Returns:
        `[i, j]`, the sum from the token after j to i, 0 unless i > j; `[i]`, the sum from the first
        token to i; `[j]`, the sum of all after j.
    """
    at = tl.arange(0, CHUNK)
    later = tl.where(at[:, None] > at[None, :], g[:, None], 0.0)
    return tl.cumsum(later, 0), tl.cumsum(g, 0), tl.sum(later, 0)


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """Multiply matrices of bfloat16; each product of two numbers is exact."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b)


@triton.jit
def _split(x):
    """Return three bfloat16 matrices that sum to one of float32, the smallest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return (rest - middle.to(tl.float32)).to(tl.bfloat16), middle, high


@triton.jit
def times_floats(a, b, UPCAST: tl.constexpr):
    """Multiply a matrix of bfloat16 by one of float32."""
    low, middle, high = _split(b)
    if UPCAST:
        a, low, middle, high = _as_floats(a, low, middle, high)
    return tl.dot(a, high, tl.dot(a, middle, tl.dot(a, low)))


@triton.jit
def floats_times(a, b, UPCAST: tl.constexpr):
    """Multiply a matrix of float32 by one of bfloat16."""
    low, middle, high = _split(a)
    if UPCAST:
        b, low, middle, high = _as_floats(b, low, middle, high)
    return tl.dot(high, b, tl.dot(middle, b, tl.dot(low, b)))


@triton.jit
def _as_floats(a, b, c, d):
    return a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)


@triton.jit(do_not_specialize=["first_row"])
def scan_kernel(  # noqa: PLR0915, PLR0917
    query,
    key,
    value,
    skip,
    mixing,
    solved,
    factors,
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
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads that share a key head
    PADDED_KEY: tl.constexpr,
    VALUES: tl.constexpr,  # per program
    KEYS_FIRST: tl.constexpr,  # whether a state is `[key_dim, value_dim]`, else transposed
    DELTA: tl.constexpr,  # whether `solved` makes changes of values
    HAS_SKIP: tl.constexpr,  # whether results have values times `skip` added
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: value heads, tiles of values, sequences."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    seq = tl.program_id(2)
    first, end, has_state = tokens_of(seq, query_starts, seq_lens)
    if end - first > FEW:
        element = tl.arange(0, PADDED_KEY)
        column = tl.program_id(1) * VALUES + tl.arange(0, VALUES)
        token = tl.arange(0, CHUNK)
        real_key = element < KEY_DIM
        real_value = column < VALUE_DIM
        place = place_of(
            seq, head, True, tables, table_stride, block_stride, row_size, first_row,
            rows_per_block,
        )  # fmt: skip
        if KEYS_FIRST:
            at = state + place + element[:, None] * VALUE_DIM + column[None, :]
        else:
            at = state + place + column[None, :] * KEY_DIM + element[:, None]
        old = column < VALUE_DIM * has_state
        s = tl.load(at, mask=real_key[:, None] & old[None, :], other=0.0)
        more = tl.load(skip + head).to(tl.float32) if HAS_SKIP else 0.0
        start = first.to(tl.int64)
        group = head // GROUP * KEY_DIM
        query_at = query + start * query_stride + group
        query_at += token[:, None] * query_stride + element[None, :]
        key_at = key + start * key_stride + group + token[:, None] * key_stride + element[None, :]
        value_at = value + start * value_stride + head * VALUE_DIM
        value_at += token[:, None] * value_stride + column[None, :]
        number = start * heads + head
        out_at = out + number * VALUE_DIM + token[:, None] * (heads * VALUE_DIM) + column[None, :]
        matrix = number * CHUNK + token[:, None] * (heads * CHUNK) + token[None, :]
        factor = factors + number * FACTORS + token * (heads * FACTORS)
        mixing_at = mixing + matrix
        solved_at = solved + matrix if DELTA else mixing_at
        for begin in range(first, end, CHUNK):
            real = token < end - begin
            known = real[:, None] & real_value[None, :]
            q = tl.load(query_at, mask=real[:, None] & real_key[None, :], other=0.0)
            result = times_floats(q, s, UPCAST)
            result *= tl.load(factor, mask=real, other=0.0)[:, None]
            v = tl.load(value_at, mask=known, other=0.0)
            weights = tl.load(mixing_at, mask=real[:, None], other=0.0)
            k = tl.load(key_at, mask=real[:, None] & real_key[None, :], other=0.0)
            if DELTA:
                seen = tl.load(factor + 3, mask=real, other=0.0)
                u = v.to(tl.float32) - times_floats(k, s, UPCAST) * seen[:, None]
                solution = tl.load(solved_at, mask=real[:, None], other=0.0)
                u = tl.dot(solution, u, input_precision=PRECISION)
                result += tl.dot(weights, u, input_precision=PRECISION)
            else:
                u = v.to(tl.float32)
                result += floats_times(weights, v, UPCAST) + more * u
            tl.store(out_at, result.to(out.dtype.element_ty), mask=known)
            u *= tl.load(factor + 1, mask=real, other=0.0)[:, None]
            total = tl.load(factor + 2, mask=real, other=1.0)
            total = tl.min(total, 0)  # of the last token: it falls
            s = s * total + times_floats(tl.trans(k), u, UPCAST)
            query_at += CHUNK * query_stride
            key_at += CHUNK * key_stride
            value_at += CHUNK * value_stride
            out_at += CHUNK * heads * VALUE_DIM
            factor += CHUNK * heads * FACTORS
            mixing_at += CHUNK * heads * CHUNK
            solved_at += CHUNK * heads * CHUNK
        tl.store(at, s, mask=real_key[:, None] & real_value[None, :])


def scan(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixing: Tensor,
    factors: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    solved: Tensor | None = None,
    skip: Tensor | None = None,
    keys_first: bool,
) -> None:
    """Compute the results of sequences of more than `FEW` tokens, and their states.

    Args:
        query: `[num_tokens, key_heads, key_dim]`.
        key: `[num_tokens, key_heads, key_dim]`.
        value: `[num_tokens, heads, value_dim]`.
        mixing: `[num_tokens, heads, CHUNK]` float32, the rows of the chunks' matrices.
        factors: `[num_tokens, heads, 4]` float32: of a query's product with the state before the
            chunk, of a value's with its key in the state after it, of the state, and of a key's
            product with the state.
        rows: The states.
        out: `[num_tokens, heads, value_dim]`; gets the results.
        solved: Matrices that make changes of values, laid out as `mixing`; None: the changes are
            the values.
        skip: `[heads]`, factors of values to add to results.
        keys_first: Whether a state is `[key_dim, value_dim]`; else it is transposed.
    """
    key_heads, key_dim = key.shape[1:]
    heads, value_dim = value.shape[1:]
    padded = padded_size(key_dim)
    values = values_per_program(key_dim, value_dim, delta=solved is not None)
    scan_kernel[heads, triton.cdiv(value_dim, values), len(rows.seq_lens)](
        *(query, key, value, skip, mixing, solved, factors, out),
        query_stride=query.stride(0),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        **row_arguments(rows),
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        GROUP=heads // key_heads,
        PADDED_KEY=padded,
        VALUES=values,
        KEYS_FIRST=keys_first,
        DELTA=solved is not None,
        HAS_SKIP=skip is not None,
        PRECISION=precision_of(describe_gpu(value.device)),
        **shared_constants(value.device),
        num_warps=WARPS,
        num_stages=STAGES,
    )


def fits_chunks(gpu: Gpu, dtype: torch.dtype, key_dim: int, *, delta: bool) -> bool:
    """Return whether these kernels compute sequences of more than `FEW` tokens."""
    narrow = gpu.is_amd and gpu.warp_size < WIDE_WARP  # it has too few registers
    return dtype == torch.bfloat16 and key_dim <= WIDEST_KEY[delta] and not narrow


def values_per_program(key_dim: int, value_dim: int, *, delta: bool) -> int:
    """Return the number of values, columns of the state, of a program of the scan."""
    most = max(LEAST, STATE_ELEMENTS[delta] // padded_size(key_dim))
    return min(most, padded_size(value_dim))


def chunk_grid(heads: int, num_tokens: int, rows: StateRows) -> tuple[int, int]:
    """Return the grid of heads and chunks; there may be fewer chunks."""
    return heads, num_tokens // CHUNK + min(len(rows.seq_lens), num_tokens // (FEW + 1))


def chunk_arguments(rows: StateRows) -> dict[str, Any]:
    """Return the arguments by which a program finds its chunk."""
    starts = {"query_starts": rows.query_starts, "seq_lens": rows.seq_lens}
    return starts | {"num_seqs": len(rows.seq_lens), "SEQS": SEQS}


def shared_constants(device: torch.device) -> dict[str, Any]:
    """Return the constants that all kernels of chunks have."""
    return {"CHUNK": CHUNK, "FEW": FEW, "UPCAST": device.type == "cpu"}


def precision_of(gpu: Gpu) -> str:
    """Return how products of float32 are computed, as exactly as by float32 arithmetic.

    NVIDIA's matrix units round to TF32, so the compiler makes three products of one. AMD's have
    instructions for float32.
    """
    return "ieee" if gpu.is_amd else "tf32x3"


def padded_size(size: int) -> int:
    """Return the size of a product's operand that holds this size."""
    padded: int = triton.next_power_of_2(size)
    return max(LEAST, padded)
