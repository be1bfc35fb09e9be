"""The gated delta rule in chunks of tokens, with one decay per head; see `chunks`.

In a chunk let k_i be the keys, D_ij the decay from token j to token i, and b_i beta. Token i adds
`outer(k_i, u_i)` to the state S, with

    u_i = b_i (v_i - D_i k_i @ S - sum over j < i of D_ij (k_i . k_j) u_j)

so u = (1 + A)^-1 diag(b) (v - ...) with the strictly lower matrix A_ij = b_i D_ij (k_i . k_j): the
UT transform of Gated DeltaNet, section 3.3.
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
from octavo.kernels.triton.chunks import (
    CHUNK,
    FACTORS,
    WARPS,
    chunk_arguments,
    chunk_grid,
    find_chunk,
    padded_size,
    precision_of,
    product,
    scan,
    shared_constants,
    spans,
)


@triton.jit
def _merge(a, inverse, WIDTH: tl.constexpr, PRECISION: tl.constexpr, CHUNK: tl.constexpr):
    """Make inverses of diagonal blocks of a width those of blocks of twice the width."""
    i = tl.arange(0, CHUNK)[:, None]
    j = tl.arange(0, CHUNK)[None, :]
    below = (i // WIDTH != j // WIDTH) & (i // (2 * WIDTH) == j // (2 * WIDTH))
    right = tl.dot(tl.where(below, a, 0.0), inverse, input_precision=PRECISION)
    return inverse - tl.dot(inverse, right, input_precision=PRECISION)


@triton.jit
def invert(a, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + a, where a is strictly lower triangular.

    Diagonal blocks of 16 are solved row by row. Two neighbouring blocks, whose inverses are S and
    T, and the block B below the first make one whose inverse is S, T and -T B S. A power series
    would have fewer steps, but its terms are so large that their sum has no exact digit.
    """
    BLOCKS: tl.constexpr = CHUNK // 16
    block = tl.arange(0, BLOCKS)
    at = tl.arange(0, 16)
    same = (block[:, None] == block[None, :])[:, None, :, None]
    own = tl.sum(tl.where(same, tl.reshape(a, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    is_row = at[None, :, None]
    inverse = tl.zeros([BLOCKS, 16, 16], tl.float32)
    inverse += tl.where(is_row == at[None, None, :], 1.0, 0.0)
    for i in range(1, 16):
        row = tl.sum(tl.where(is_row == i, own, 0.0), 1)
        known = tl.sum(row[:, :, None] * inverse, 1)
        inverse -= tl.where(is_row == i, known[:, None, :], 0.0)
    inverse = tl.reshape(tl.where(same, inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])
    for doubling in tl.static_range(4, 7):
        if 1 << doubling < CHUNK:
            inverse = _merge(a, inverse, 1 << doubling, PRECISION, CHUNK)
    return inverse


@triton.jit(do_not_specialize=["num_seqs"])
def prepare_delta_kernel(  # noqa: PLR0917
    query,
    key,
    g,
    beta,
    mixing,
    solved,
    factors,
    query_starts,
    seq_lens,
    num_seqs,
    query_stride,
    key_stride,
    scale,
    KEY_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_KEY: tl.constexpr,
    EPSILON: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    FEW: tl.constexpr,
    SEQS: tl.constexpr,
    UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: value heads, chunks."""
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    first, end = find_chunk(tl.program_id(1), query_starts, seq_lens, num_seqs, CHUNK, FEW, SEQS)
    if first < end:
        token = tl.arange(0, CHUNK)
        element = tl.arange(0, PADDED_KEY)
        row = first.to(tl.int64) + token
        real = row < end
        known = real[:, None] & (element < KEY_DIM)[None, :]
        keys = row[:, None] * key_stride + head // GROUP * KEY_DIM + element[None, :]
        queries = row[:, None] * query_stride + head // GROUP * KEY_DIM + element[None, :]
        k = tl.load(key + keys, mask=known, other=0.0)
        q = tl.load(query + queries, mask=known, other=0.0)
        number = row * heads + head
        decays, into, onto = spans(tl.load(g + number, mask=real, other=0.0).to(tl.float32), CHUNK)
        decays = tl.exp(decays)
        into = tl.exp(into)
        onto = tl.exp(onto)
        strength = tl.load(beta + number, mask=real, other=0.0).to(tl.float32)
        of_key = tl.full([CHUNK], 1.0, tl.float32)
        of_query = tl.full([CHUNK], 1.0, tl.float32) * scale
        if NORMALIZE:
            wide_key, wide_query = k.to(tl.float32), q.to(tl.float32)
            of_key /= tl.sqrt(tl.sum(wide_key * wide_key, 1) + EPSILON)
            of_query /= tl.sqrt(tl.sum(wide_query * wide_query, 1) + EPSILON)
        decays *= of_key[None, :]
        same = product(k, tl.trans(k), UPCAST) * decays * (strength * of_key)[:, None]
        same = tl.where(token[:, None] > token[None, :], same, 0.0)
        solution = invert(same, CHUNK, PRECISION) * strength[None, :]
        weights = product(q, tl.trans(k), UPCAST) * decays * of_query[:, None]
        weights = tl.where(token[:, None] >= token[None, :], weights, 0.0)
        matrix = number[:, None] * CHUNK + token[None, :]
        tl.store(mixing + matrix, weights, mask=real[:, None])
        tl.store(solved + matrix, solution, mask=real[:, None])
        to = factors + number * FACTORS
        tl.store(to, into * of_query, mask=real)
        tl.store(to + 1, onto * of_key, mask=real)
        tl.store(to + 2, into, mask=real)
        tl.store(to + 3, into * of_key, mask=real)


def compute_delta_chunks(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    scale: float,
    normalize: bool,
) -> None:
    """Compute the sequences of more than `chunks.FEW` tokens; see `octavo.kernels.states`.

    Args:
        query: `[num_tokens, key_heads, key_dim]`; all but its tokens are contiguous.
        key: `[num_tokens, key_heads, key_dim]`; likewise.
        value: `[num_tokens, heads, value_dim]`; likewise.
        g: `[num_tokens, heads]`, contiguous.
        beta: `[num_tokens, heads]`, contiguous.
        rows: The states.
        out: `[num_tokens, heads, value_dim]`; gets the results.
        scale: Factor of queries.
        normalize: Whether queries and keys are divided by their length.
    """
    key_heads, key_dim = key.shape[1:]
    num_tokens, heads = beta.shape
    mixing, solved = value.new_empty((2, num_tokens, heads, CHUNK), dtype=torch.float32)
    factors = mixing.new_empty((num_tokens, heads, FACTORS.value))
    prepare_delta_kernel[chunk_grid(heads, num_tokens, rows)](
        *(query, key, g, beta, mixing, solved, factors),
        **chunk_arguments(rows),
        query_stride=query.stride(0),
        key_stride=key.stride(0),
        scale=scale,
        KEY_DIM=key_dim,
        GROUP=heads // key_heads,
        PADDED_KEY=padded_size(key_dim),
        EPSILON=EPSILON,
        NORMALIZE=normalize,
        PRECISION=precision_of(describe_gpu(value.device)),
        **shared_constants(value.device),
        num_warps=WARPS,
    )
    scan(query, key, value, mixing, factors, rows, out, solved=solved, keys_first=True)
