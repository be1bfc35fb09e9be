"""What may be drafted behind a sequence's tokens."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guess:
    """What may be drafted behind a sequence's tokens.

    Attributes:
        token_ids: what a method of drafting takes to come next, maybe nothing.
        most: the most tokens to draft.
    """

    token_ids: Sequence[int] = ()
    most: int = 0


NO_GUESS = Guess()
