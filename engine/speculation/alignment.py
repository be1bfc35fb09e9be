"""Drafts for a sequence that has just departed from the text that it copies.

Right after a copy replaces, adds or omits a token, its last two tokens do not occur in the source.
But the copy most likely continues near its current place in the source.
"""

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

BEFORE, AFTER = 32, 64
"""Search range for the last token: tokens before and after the expected place."""
LAPSE = 16
"""Maximum tokens since the last match; after that, only a new match gives a draft."""
REPLACED = 4
"""Maximum drafted tokens after a token that is not in the source near the place."""


class Alignment:
    """The place in its own tokens that a sequence copies from.

    Attributes:
        drafted: Whether the sequence's last draft came from here, without a match.
    """

    def __init__(self) -> None:
        self.drafted = False
        self._place = 0
        self._length = 0  # length of the sequence at this place
        self._until = 0  # length of the sequence at which the place expires

    def match(self, place: int, length: int) -> None:
        """Record a match.

        Args:
            place: Index of the token after those that match the sequence's end.
            length: Length of the sequence.
        """
        self._place, self._length, self._until = place, length, length + LAPSE

    def draft(self, tokens: Tokens, most: int) -> list[int]:
        """Return the tokens after the last token's occurrence near the expected place.

        If the last token does not occur there, assume that it replaces the token at that place.

        Args:
            tokens: `[n]` int32, the sequence.
            most: Maximum tokens to return.
        """
        self.drafted = True
        if len(tokens) > self._until:
            return []
        expected = self._place + len(tokens) - self._length
        first = max(0, expected - BEFORE)
        window = tokens[first : min(expected + AFTER, len(tokens) - 1)]
        near = np.flatnonzero(window == tokens[-1]) + first + 1
        if not len(near):
            replaced: list[int] = tokens[expected : expected + min(most, REPLACED)].tolist()
            return replaced
        self._place = int(near[np.abs(near - expected).argmin()])
        self._length = len(tokens)
        following: list[int] = tokens[self._place : self._place + most].tolist()
        return following
