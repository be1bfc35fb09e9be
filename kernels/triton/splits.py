"""Into how many pieces the keys of sequences are cut, so that a GPU is busy everywhere."""

from functools import cache

MAX_SPLITS = 128
LEAST_KEYS = 256
"""A piece has so many keys at least: less is not worth its start and its merge."""
START_KEYS = 128
"""What starting a program and merging its piece costs, in keys that it could have read."""


@cache
def choose_splits(programs: int, longest: int, places: int) -> int:
    """Return how many pieces the longest sequence is cut into.

    As many as make the last wave of programs end soonest: with `programs` enough for
    the whole GPU that is one, with few sequences of long context many.

    Args:
        programs: Without splits: sequences (tiles of queries) x KV heads.
        longest: Keys of the longest sequence.
        places: Programs of this kind that the GPU runs side by side.
    """

    def time(splits: int) -> int:
        waves = -(-programs * splits // places)
        return waves * (-(-longest // splits) + START_KEYS)

    most = min(MAX_SPLITS, max(1, longest // LEAST_KEYS))
    return min(range(1, most + 1), key=time)
