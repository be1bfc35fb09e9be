"""Chooses the number of pieces of each sequence's keys, so that all of a GPU is busy."""

from functools import lru_cache

import numpy as np

from octavo.kernels.triton.tiles import WorkKind

MAX_SPLITS = 128
MIN_KEYS = 256
"""Minimum keys per piece: fewer do not pay for a launch and a merge."""
START_KEYS = 128
"""Cost of starting a program and merging its piece, in keys read."""
MAX_WAVES: dict[WorkKind, int] = {"decode": 8, "chunk": 4}
"""Maximum waves of programs with pieces. A CUDA graph has room for all of them, though most steps
leave them idle; a chunk's programs and partial results are larger."""


def max_pieces(kind: WorkKind, num_kv_heads: int, concurrent: int) -> int:
    """Return the maximum number of items that keys are split into; see `choose_splits`."""
    return MAX_WAVES[kind] * concurrent // num_kv_heads


def choose_splits(
    lengths: np.ndarray, num_kv_heads: int, concurrent: int, kind: WorkKind = "decode"
) -> np.ndarray:
    """Return the number of pieces of each tile's keys, `[num_tiles]`.

    All pieces are about as long: so a long sequence beside many short ones is cut, and these are
    not. The length minimizes the time until the last wave of programs ends. If many sequences of
    one length fill the GPU, none is cut.

    Args:
        lengths: `[num_tiles]`, the keys that each tile of queries sees.
        num_kv_heads: KV heads, each with a program for each piece.
        concurrent: Programs of this kind that the GPU runs concurrently.
        kind: The kind of work of the programs.
    """
    units, places, numbers = np.unique(lengths // MIN_KEYS, return_inverse=True, return_counts=True)
    most = max_pieces(kind, num_kv_heads, concurrent)
    known = tuple(zip(units.tolist(), numbers.tolist(), strict=True))
    return np.array(_cheapest(known, num_kv_heads, concurrent, most), np.int32)[places]


@lru_cache(maxsize=512)  # entries of up to 30 KB
def _cheapest(
    known: tuple[tuple[int, int], ...], num_kv_heads: int, concurrent: int, most: int
) -> list[int]:
    """Return the number of pieces of tiles of each length.

    Lengths are rounded so that most steps find their answer from the step before.

    Args:
        known: Lengths in `MIN_KEYS` keys, ascending, and the number of tiles of each.
        num_kv_heads: See `choose_splits`.
        concurrent: See `choose_splits`.
        most: Maximum number of pieces of all tiles, if any is cut.
    """
    units, numbers = np.array(known, np.int64).reshape(-1, 2).T[:, ::-1]  # longest first
    if not len(units):
        return []
    keys = units * MIN_KEYS
    # A row for each length of pieces, a column for each length of tiles.
    ways = np.arange(1, max(1, min(MAX_SPLITS, units[0])) + 1)[:, None]
    piece_keys = np.maximum(_ceil(keys[0], ways), MIN_KEYS)
    pieces = np.clip(_ceil(keys, piece_keys), 1, np.maximum(units, 1))
    costs = _ceil(keys, pieces) + START_KEYS
    order = np.argsort(-costs, axis=1, kind="stable")
    programs = np.take_along_axis(pieces * numbers * num_kv_heads, order, 1)
    ends = np.cumsum(programs, 1)
    # Of programs in descending order of their costs, each wave takes as long as its first.
    waves = _ceil(ends, concurrent) - _ceil(ends - programs, concurrent)
    times = (waves * np.take_along_axis(costs, order, 1)).sum(1)
    allowed = (pieces * numbers).sum(1) <= most
    allowed[0] = True
    best = np.argmin(np.where(allowed, times, times.max() + 1))
    chosen: list[int] = pieces[best, ::-1].tolist()
    return chosen


def _ceil(dividend: np.ndarray, divisor: np.ndarray | int) -> np.ndarray:
    return -(-dividend // divisor)
