"""The number of pieces to split a sequence's keys into, so that all of a GPU is busy."""

from functools import cache

MAX_SPLITS = 128
LEAST_KEYS = 256
"""Minimum keys per piece: fewer are not worth a launch and a merge."""
START_KEYS = 128
"""The cost of starting a program and merging its piece, in keys read."""
MAX_WAVES = 8
"""Of programs with pieces: what the partial results of a CUDA graph have room for."""


def most_pieces(num_kv_heads: int, places: int) -> int:
    """Return the most items that keys are split into; see `choose_splits`."""
    return MAX_WAVES * places // num_kv_heads


@cache
def choose_splits(programs: int, longest: int, places: int) -> int:
    """Return the number of pieces for the longest sequence.

    It minimizes the end of the last wave of programs: one piece if `programs` fill the GPU, many
    for few sequences with long contexts.

    Args:
        programs: Number of programs without splits: sequences (tiles of queries) x KV heads;
            at least 1.
        longest: Keys of the longest sequence.
        places: Programs of this kind that the GPU runs concurrently.
    """

    def time(splits: int) -> int:
        waves = -(-programs * splits // places)
        return waves * (-(-longest // splits) + START_KEYS)

    most = min(MAX_SPLITS, longest // LEAST_KEYS, MAX_WAVES * places // programs)
    return min(range(1, max(1, most) + 1), key=time)
