"""The rows and keys of a program: attention and merge must use the same."""

# Triton compiles the kernels' source, whose types mypy does not know.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def first_seen(position, span, CHUNKED: tl.constexpr):
    """Return the first key that a query at `position` sees; chunks and windows have `span` keys."""
    first = position - position % span if CHUNKED else position - span + 1
    return tl.maximum(first, 0)


@triton.jit
def share_of(  # noqa: PLR0917
    items,
    item,
    query_starts,
    seq_lens,
    span,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    MIN_TILES: tl.constexpr,
    HAS_SPAN: tl.constexpr,
    CHUNKED: tl.constexpr,
):
    """Read an item of the plan.

    Returns:
        The sequence; the flat index of its first query; its number of queries; its number of
        tokens; the item's first row; the begin and end of the tiles of keys that its rows see; the
        tiles of keys per piece; the number of pieces; the item's piece. Items beyond the available
        keys have no keys.
    """
    seq = tl.load(items + item * 4)
    first_row = tl.load(items + item * 4 + 1) * ROWS
    split = tl.load(items + item * 4 + 2)
    splits = tl.load(items + item * 4 + 3)
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - query_len
    end = tl.minimum(context + (first_row + ROWS - 1) // GROUP + 1, seq_len)
    # A CUDA graph plans for more queries than a sequence may have: surplus items see no keys.
    end = tl.where(first_row < query_len * GROUP, end, 0)
    begin = 0
    if HAS_SPAN:
        begin = first_seen(context + first_row // GROUP, span, CHUNKED) // KEYS * KEYS
    tiles = tl.cdiv(tl.maximum(end - begin, 0), KEYS)
    piece = tl.maximum(tl.cdiv(tiles, splits), MIN_TILES)
    pieces = tl.cdiv(tiles, piece)
    return seq, query_start, query_len, seq_len, first_row, begin, end, piece, pieces, split
