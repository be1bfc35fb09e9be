"""The rows and keys of a program, on which attention and merge must agree."""

# Triton compiles its kernels' source, where types are its own.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def share_of(  # noqa: PLR0917
    items,
    item,
    query_starts,
    seq_lens,
    sliding_window,
    splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Read an item of the plan.

    Returns:
        The sequence; the flat index of its first query; its number of queries; its number of
        tokens; the item's first row; the begin and end of the keys that its rows see; the tiles of
        keys per piece; the number of pieces, at most `splits`.
    """
    seq = tl.load(items + item * 2)
    first_row = tl.load(items + item * 2 + 1) * ROWS
    query_start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - query_start
    seq_len = tl.load(seq_lens + seq)
    context = seq_len - query_len
    end = tl.minimum(context + (first_row + ROWS - 1) // GROUP + 1, seq_len)
    begin = 0
    if HAS_WINDOW:
        first_seen = context + first_row // GROUP - sliding_window + 1
        begin = tl.maximum(first_seen, 0) // KEYS * KEYS
    tiles = tl.cdiv(tl.maximum(end - begin, 0), KEYS)
    piece = tl.maximum(tl.cdiv(tiles, splits), LEAST_TILES)
    return seq, query_start, query_len, seq_len, first_row, begin, end, piece, tl.cdiv(tiles, piece)
