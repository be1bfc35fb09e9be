"""Finds earlier occurrences of a sequence's last tokens."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.engine.speculation.alignment import Tokens

LONGEST = 32
"""Maximum compared tokens: a longer match adds nothing."""
FEW = 32
"""Maximum compared places: the latest ones."""


class Matches(NamedTuple):
    """The earlier places with the longest match of the last tokens.

    Attributes:
        length: Length of the match, up to `LONGEST`; 0 without a match.
        ends: `[n]` int64, one past each match, ascending.
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
    """Return the places after which the longest suffix of `tail` ends.

    Args:
        tokens: `[n]` int32, the tokens to search.
        ends: `[m]` int64, one past each candidate, ascending; its last `length` tokens match.
        tail: `[k]` int32, the tokens to find.
        length: Number of tokens already known to match.
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
