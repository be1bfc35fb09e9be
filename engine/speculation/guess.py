"""Tokens that a draft method proposes for a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that a method proposes to draft for a sequence, and the maximum to draft.

    Attributes:
        token_ids: The tokens that the method proposes; may be empty.
        most: Maximum tokens to draft.
    """

    token_ids: Sequence[int] = ()
    most: int = 0


NO_GUESS = Guess()
