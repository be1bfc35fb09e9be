"""Chooses the number of pieces of a sequence's keys, so that all of a GPU is busy."""

from functools import lru_cache

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


def choose_splits(programs: int, longest: int, concurrent: int, kind: WorkKind = "decode") -> int:
    """Return the number of pieces for the longest sequence.

    It minimizes the time until the last wave of programs ends: one piece if `programs` fill the
    GPU, many pieces for few sequences with long contexts.

    Args:
        programs: Number of programs without splits: sequences (tiles of queries) x KV heads;
            at least 1.
        longest: Keys of the longest sequence.
        concurrent: Programs of this kind that the GPU runs concurrently.
        kind: The kind of work of the programs.
    """
    return _cheapest(programs, longest // MIN_KEYS, concurrent, MAX_WAVES[kind])


@lru_cache(maxsize=4096)
def _cheapest(programs: int, most: int, concurrent: int, max_waves: int) -> int:
    """Return the number of pieces, at most `most`, of as many times `MIN_KEYS` keys.

    The length is rounded so that most steps find their answer from the step before.
    """

    def time(splits: int) -> int:
        waves = -(-programs * splits // concurrent)
        return waves * (-(-most * MIN_KEYS // splits) + START_KEYS)

    allowed = min(MAX_SPLITS, most, max_waves * concurrent // programs)
    return min(range(1, max(1, allowed) + 1), key=time)
