"""What every output parser does: it takes a text as it grows, and gives typed pieces of it."""

from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar, NamedTuple

from octavo.router.text.markers import first_match, possible_start


class PieceKind(Enum):
    """What a piece of an output is."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # the name of a tool: a call begins
    ARGUMENTS = "arguments"  # the next piece of the last call's arguments


class Piece(NamedTuple):
    """A piece of an output."""

    kind: PieceKind
    text: str


class Parser(ABC):
    """Reads one output as it grows.

    It holds back only what may become a marker, and gives no marker as text. What it gives does
    not depend on where the text was cut, except for where its pieces are cut.

    Attributes:
        markers: Special tokens that it must see, as they are spelt.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Take more text and return what is known of all that came."""

    @abstractmethod
    def flush(self) -> list[Piece]:
        """Return the pieces that were held back: the output has ended."""

    @property
    def reasons(self) -> bool:
        """Whether what came last is within reasoning."""
        return False

    @property
    def calls(self) -> bool:
        """Whether what came last is within a call, which is read to its end whatever is in it."""
        return False

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that it must see, those of a parser in it included."""
        return frozenset(self.markers)


class Buffer:
    """Text that has not been read."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        """Add what follows."""
        self._text += text

    def until(self, markers: tuple[str, ...]) -> tuple[str, str | None]:
        """Return the text before the first marker, and that marker; both are taken.

        If there is none, return the text that cannot be part of one, and None.
        """
        match = first_match(self._text, markers)
        if match is not None:
            start, marker = match
            text = self._text[:start]
            self._text = self._text[start + len(marker) :]
            return text, marker
        keep = len(self._text) - possible_start(self._text, markers)
        text, self._text = self._text[:keep], self._text[keep:]
        return text, None

    def rest(self) -> str:
        """Return and take all of it."""
        text, self._text = self._text, ""
        return text
