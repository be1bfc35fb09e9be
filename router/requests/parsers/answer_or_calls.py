"""Outputs that are calls alone, or an answer in the form that a client wants."""

from collections.abc import Sequence

from octavo.router.requests.parsers.parser import Parser, Piece, PieceKind


class AnswerOrCalls(Parser):
    """Calls where an output begins as they do; else all of it is content.

    So an answer may hold the texts of markers, a JSON string for example.

    Args:
        starts: Beginnings of calls.
        calls: Reads them.
    """

    def __init__(self, starts: Sequence[str], calls: Parser) -> None:
        self._starts = tuple(starts)
        self._calls = calls
        self._held = ""  # until it is known what the output is
        self._called: bool | None = None

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that it must see."""
        return self._calls.visible

    @property
    def calls(self) -> bool:
        """Whether what came last is within a call."""
        return bool(self._called) and self._calls.calls

    def feed(self, text: str) -> list[Piece]:
        """Take more text and return what is known of all that came."""
        if self._called is None:
            text = self._held + text
            if any(one != text and one.startswith(text) for one in self._starts):
                self._held = text
                return []
            self._called, self._held = text.startswith(self._starts), ""
        if self._called:
            return self._calls.feed(text)
        return [Piece(PieceKind.CONTENT, text)] if text else []

    def flush(self) -> list[Piece]:
        """Return the pieces that were held back: the output has ended."""
        if self._called:
            return self._calls.flush()
        return [Piece(PieceKind.CONTENT, self._held)] if self._held else []
