"""Draft the next tokens of a sequence that has just departed from the text it copies.

Right after a copy replaces, adds or omits a token, its last two tokens do not occur in the source.
But the copy most likely continues near the place that it has reached there.
"""

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

BEFORE, AFTER = 32, 64
"""Tokens before and after the expected place that are searched for the last token."""
LAPSE = 16
"""Maximum tokens since the last match. After more, only a new match gives a draft."""
REPLACED = 4
"""Maximum tokens to draft after a token that the source does not have near the place."""


class Alignment:
    """The place in its own tokens that a sequence copies from.

    Attributes:
        drafted: Whether the sequence's last draft was made here, without a match.
    """

    def __init__(self) -> None:
        self.drafted = False
        self._place = 0
        self._length = 0  # of the sequence when it was at this place
        self._until = 0  # length of the sequence at which the place lapses

    def match(self, place: int, length: int) -> None:
        """Record a match.

        Args:
            place: Place of the token that follows the tokens which match the sequence's end.
            length: Length of the sequence.
        """
        self._place, self._length, self._until = place, length, length + LAPSE

    def draft(self, tokens: Tokens, most: int) -> list[int]:
        """Return the tokens that follow the last one near the expected place.

        If the last token does not occur there, it is assumed to replace the token at that place.

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
