"""Find earlier occurrences of a sequence's last tokens."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.speculation.alignment import Tokens

LONGEST = 32
"""Maximum tokens that are compared: a longer match adds nothing."""
FEW = 32
"""Maximum places that are compared: the latest ones."""


class Matches(NamedTuple):
    """The earlier places that match the most of the last tokens.

    Attributes:
        length: Number of last tokens that are the same there, up to `LONGEST`; 0 if none are.
        ends: `[n]` int64, one past each place, rising.
    """

    length: int
    ends: NDArray[np.int64]


NOWHERE = Matches(0, np.empty(0, np.int64))


def find_matches(tokens: Tokens) -> Matches:
    """Find the earlier occurrences of a sequence's end.

    Args:
        tokens: `[n]` int32, the sequence.
    """
    if len(tokens) < 2:
        return NOWHERE
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
    return longest_of(tokens, ends, tokens[-LONGEST:], 1)


def longest_of(tokens: Tokens, ends: NDArray[np.int64], tail: Tokens, length: int) -> Matches:
    """Return the places before which the longest end of `tail` occurs.

    Args:
        tokens: `[n]` int32, the tokens to search.
        ends: `[m]` int64, one past each place, rising; the last `length` tokens are the same there.
        tail: `[k]` int32, the tokens to find.
        length: Number of them that are known to match.
    """
    if not len(ends):
        return NOWHERE
    while length < len(tail):
        before = ends[ends > length]
        same = before[tokens[before - length - 1] == tail[-length - 1]]
        if not len(same):
            break
        ends, length = same, length + 1
    return Matches(length, ends[-FEW:])
