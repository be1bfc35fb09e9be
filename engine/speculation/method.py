"""The interface of methods of drafting, `Method`, and their state of a sequence, `DraftState`."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from octavo.engine.speculation.history import History


@dataclass(slots=True, eq=False)
class DraftState:
    """The state of drafting for one sequence.

    Attributes:
        history: Its tokens.
        acceptance: The estimated probability that a drafted token is right if those before it are.
        aligned: The same probability for drafts without a match; see `Alignment`.
        pause: Tokens to sample before the next draft.
        last_pause: Length of the last pause; 0 if the last draft paid.
    """

    history: History
    acceptance: float
    aligned: float = 0.0
    pause: int = 0
    last_pause: int = 0


class Method(ABC):
    """Drafts tokens from those that were seen."""

    @abstractmethod
    def draft(self, history: History, most: int) -> list[int]:
        """Return tokens that may follow a sequence's: at most `most`, maybe none."""

    @abstractmethod
    def learn(self, history: History) -> None:
        """Learn from an output that ended."""
