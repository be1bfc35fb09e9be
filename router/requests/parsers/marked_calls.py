"""Tool calls that begin with markers, inside content."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from octavo.router.requests.parsers.parser import Buffer, Parser, Piece, PieceKind


class Call(ABC):
    """Parser of the text after a marker: one call or several."""

    @abstractmethod
    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Parse more text, and append the pieces that are certain.

        Args:
            text: The text that follows the last call's.
            pieces: The list to append to.

        Returns:
            Text after the call, once it is complete; None until then.
        """

    @abstractmethod
    def flush(self, pieces: list[Piece]) -> None:
        """Append the held text: the output ended within the call."""


class MarkedCalls(Parser):
    """Content with calls in it; white space around calls is dropped.

    Args:
        opens: Creates the parser of the text after each marker.
        ignored: Other markers, such as those that end a call.
        bare: Creates the parser of an unmarked call, by the output's first character.
        shown: Special tokens that the call parsers must see.
    """

    def __init__(
        self,
        opens: Mapping[str, Callable[[], Call]],
        ignored: tuple[str, ...] = (),
        bare: Mapping[str, Callable[[], Call]] | None = None,
        shown: tuple[str, ...] = (),
    ) -> None:
        self._opens = opens
        self._all = (*opens, *ignored)
        self._bare = bare or {}
        self._shown = shown
        self._buffer = Buffer()
        self._call: Call | None = None
        self._at_start = bool(bare)  # only white space so far
        self._after_call = False  # drop white space in the next text
        self._lines = ""  # line breaks to drop if a call follows

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that the parser must see."""
        return frozenset((*self._all, *self._shown))

    @property
    def calls(self) -> bool:
        """Whether the last text is within a call."""
        return self._call is not None

    def feed(self, text: str) -> list[Piece]:
        """Parse more text; return the pieces that are certain."""
        pieces: list[Piece] = []
        self._buffer.add(text)
        while True:
            if self._at_start and not self._begin():
                return pieces
            if self._call is None:
                content, marker = self._buffer.until(self._all)
                self._content(content, pieces)
                if marker is None:
                    return pieces
                self._mark(marker)
            else:
                rest = self._call.feed(self._buffer.rest(), pieces)
                if rest is None:
                    return pieces
                self._call = None
                self._buffer.add(rest)
                # Text after something that was not a call is kept unchanged.
                self._after_call = pieces[-1:] == [] or pieces[-1].kind != PieceKind.CONTENT

    def flush(self) -> list[Piece]:
        """Return the held pieces: the output has ended."""
        pieces: list[Piece] = []
        if self._call is not None:
            self._call.flush(pieces)
        else:
            rest = self._buffer.rest()
            # After a call, the rest is a truncated marker.
            self._content("" if self._after_call else rest, pieces)
            if self._lines and not self._after_call:
                pieces.append(Piece(PieceKind.CONTENT, self._lines))
        return pieces

    def _begin(self) -> bool:
        """Check the output's first character; return False if there is none yet."""
        text = self._buffer.rest()
        self._buffer.add(text)
        first = text.lstrip()[:1]
        if not first:
            return False
        self._at_start = False
        if first in self._bare:
            self._call = self._bare[first]()
        return True

    def _mark(self, marker: str) -> None:
        self._lines = ""
        self._after_call = True
        if marker in self._opens:
            self._call = self._opens[marker]()

    def _content(self, text: str, pieces: list[Piece]) -> None:
        text = self._lines + text
        if self._after_call:
            text = text.lstrip()
        shown = text.rstrip("\n")
        self._lines = text[len(shown) :]
        if shown:
            self._after_call = False
            pieces.append(Piece(PieceKind.CONTENT, shown))
