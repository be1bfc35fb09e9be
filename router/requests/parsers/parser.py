"""The interface of output parsers: they turn growing text into typed pieces."""

from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar, NamedTuple

from octavo.router.text.markers import first_match, possible_start


class PieceKind(Enum):
    """The kind of an output's piece."""

    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # a call begins; text is the tool's name
    ARGUMENTS = "arguments"  # the next piece of the last call's arguments


class Piece(NamedTuple):
    """A piece of an output."""

    kind: PieceKind
    text: str


class Parser(ABC):
    """Parses one output as it grows.

    It holds back only text that may become a marker, and drops markers. The result does not depend
    on how the text was split, except for the borders of pieces.

    Attributes:
        markers: Special tokens that the parser must see, in their spelling.
    """

    markers: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def feed(self, text: str) -> list[Piece]:
        """Parse more text; return the pieces that are certain."""

    @abstractmethod
    def flush(self) -> list[Piece]:
        """Return the held pieces: the output has ended."""

    @property
    def reasons(self) -> bool:
        """Whether the last text is within reasoning."""
        return False

    @property
    def calls(self) -> bool:
        """Whether the last text is within a call, which is read to its end whatever it contains."""
        return False

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that this parser or a nested one must see."""
        return frozenset(self.markers)


class Buffer:
    """Text that has not been parsed."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        """Add what follows."""
        self._text += text

    def until(self, markers: tuple[str, ...]) -> tuple[str, str | None]:
        """Remove and return the text before the first marker, and the marker.

        Without a marker, return the text that cannot be part of one, and None.
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
        """Remove and return all of it."""
        text, self._text = self._text, ""
        return text
