"""Merges the results of the programs that split a sequence's keys.

Each piece has attention over its own keys and its softmax denominator's logarithm. The result is
the pieces' mean, weighted by their denominators (Flash-Decoding, Dao et al. 2023). Sinks belong to
no piece: this kernel adds them to the denominators. A program merges some query rows of a tile's
adjacent items. It does nothing for later items, and for keys that were not split.
"""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from octavo.kernels.triton.shares import share_of


@triton.jit
def add_sink(maximum, total, sink):
    """Add a logit to softmaxes; return their denominators, the old shares, and the new maxima."""
    greatest = tl.maximum(maximum, sink)
    share = tl.exp2(maximum - greatest)
    return total * share + tl.exp2(sink - greatest), share, greatest


@triton.jit(do_not_specialize=["items", "partial_out", "partial_lse", "span"])
def merge_splits(  # noqa: PLR0917
    out,
    partial_out,
    partial_lse,
    items,
    query_starts,
    seq_lens,
    sinks,
    span,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_VALUE: tl.constexpr,
    ROWS: tl.constexpr,
    PARTIAL_ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    HAS_SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LOG2_E: tl.constexpr,
    MERGED_ROWS: tl.constexpr,  # per program
    PIECES: tl.constexpr,  # merged at a time
):
    """Grid: items that may be pieces, KV heads, MERGED_ROWS of PARTIAL_ROWS.

    The arguments are as in paged_attention.py.
    """
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    _, query_start, query_len, _, first_row, _, _, _, pieces, split = share_of(
        items, item, query_starts, seq_lens, span,
        GROUP, ROWS, KEYS, MIN_TILES, HAS_SPAN, CHUNKED,
    )  # fmt: skip
    first_local = tl.program_id(2) * MERGED_ROWS
    is_first = (pieces > 1) & (split == 0)
    if is_first & (first_row + first_local < query_len * GROUP):
        local = first_local + tl.arange(0, MERGED_ROWS)
        row = first_row + local
        real_row = (row < query_len * GROUP) & (local < PARTIAL_ROWS)
        head = kv_head * GROUP + row % GROUP
        dim = tl.arange(0, PADDED_VALUE)
        real_dim = dim < VALUE_DIM
        maximum = tl.full([MERGED_ROWS], -1e30, tl.float32)
        total = tl.zeros([MERGED_ROWS], tl.float32)
        merged = tl.zeros([MERGED_ROWS, PADDED_VALUE], tl.float32)
        heads = tl.num_programs(1)
        for begin in range(0, pieces, PIECES):
            piece = begin + tl.arange(0, PIECES)
            part = ((item + piece) * heads + kv_head).to(tl.int64) * PARTIAL_ROWS
            place = part[None, :] + local[:, None]
            real = (piece < pieces)[None, :] & real_row[:, None]
            lse = tl.load(partial_lse + place, mask=real, other=float("-inf"))
            partial = tl.load(
                partial_out + place[:, :, None] * VALUE_DIM + dim[None, None, :],
                mask=real[:, :, None] & real_dim[None, None, :],
                other=0.0,
            )
            # Starts finite: rows for which no piece saw a key become zeros, not NaN.
            new_maximum = tl.maximum(maximum, tl.max(lse, 1))
            weights = tl.exp2(lse - new_maximum[:, None])
            rescale = tl.exp2(maximum - new_maximum)
            total = total * rescale + tl.sum(weights, 1)
            merged = merged * rescale[:, None] + tl.sum(partial * weights[:, :, None], 1)
            maximum = new_maximum
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=real_row, other=float("-inf")) * LOG2_E
            total, share, maximum = add_sink(maximum, total, sink)
            merged *= share[:, None]
        merged = merged / tl.where(total > 0, total, 1.0)[:, None]
        flat_token = (query_start + row // GROUP).to(tl.int64)
        to = (flat_token * NUM_HEADS + head) * VALUE_DIM
        tl.store(
            out + to[:, None] + dim[None, :],
            merged.to(out.dtype.element_ty),
            mask=real_row[:, None] & real_dim[None, :],
        )
