"""Calls that begin with markers, in content."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from octavo.router.requests.parsers.parser import Buffer, Parser, Piece, PieceKind


class Call(ABC):
    """Reads what follows a marker: one call or several."""

    @abstractmethod
    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Take text, and append what is known of it.

        Args:
            text: The text behind what was fed before.
            pieces: The list to append to.

        Returns:
            What is behind the call, once it is complete; None until then.
        """

    @abstractmethod
    def flush(self, pieces: list[Piece]) -> None:
        """Append what was held back: the output ended within the call."""


class MarkedCalls(Parser):
    """Content with calls in it; white space around calls is no content.

    Args:
        opens: Makes the parser of the text behind each marker.
        ignored: Other markers, such as those that end a call.
        bare: Makers by the character with which an output begins that consists of calls without a
            marker, what makes their reader.
        shown: Special tokens that the readers of calls must see.
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
        self._at_start = bool(bare)  # nothing but white space has come
        self._after_call = False  # of what comes, white space is dropped
        self._lines = ""  # line ends that are dropped if a call follows

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that it must see."""
        return frozenset((*self._all, *self._shown))

    @property
    def calls(self) -> bool:
        """Whether what came last is within a call."""
        return self._call is not None

    def feed(self, text: str) -> list[Piece]:
        """Take more text and return what is known of all that came."""
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
                # What turned out to be no call may be followed by anything.
                self._after_call = pieces[-1:] == [] or pieces[-1].kind != PieceKind.CONTENT

    def flush(self) -> list[Piece]:
        """Return the pieces that were held back: the output has ended."""
        pieces: list[Piece] = []
        if self._call is not None:
            self._call.flush(pieces)
        else:
            rest = self._buffer.rest()
            # Behind a call it is a marker that was cut off.
            self._content("" if self._after_call else rest, pieces)
            if self._lines and not self._after_call:
                pieces.append(Piece(PieceKind.CONTENT, self._lines))
        return pieces

    def _begin(self) -> bool:
        """Look at how the output begins; return whether that is known."""
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
