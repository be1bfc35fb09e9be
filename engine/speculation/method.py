"""The interface of draft methods, `Method`, with their state and their guess for a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.speculation.history import History


@dataclass(slots=True, eq=False)
class DraftState:
    """The drafting state of one sequence.

    Attributes:
        history: Its tokens.
        acceptance: Estimated probability that a drafted token is right if those before are.
        aligned: The same probability for drafts without a match; see `Alignment`.
        pause: Tokens to sample before the next draft.
        last_pause: Length of the last pause; 0 if the last draft paid.
    """

    history: History
    acceptance: float
    aligned: float = 0.0
    pause: int = 0
    last_pause: int = 0


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


class Method(ABC):
    """Drafts tokens from earlier tokens."""

    @abstractmethod
    def draft(self, history: History, most: int) -> list[int]:
        """Return likely next tokens of a sequence: at most `most`, maybe none."""

    @abstractmethod
    def learn(self, history: History) -> None:
        """Learn from an output that ended."""
