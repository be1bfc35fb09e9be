"""Outputs that are either calls alone, or an answer under the client's constraint."""

from collections.abc import Sequence

from octavo.router.requests.parsers.parser import Parser, Piece, PieceKind


class AnswerOrCalls(Parser):
    """Parse calls if the output begins like one; else all text is content.

    So an answer, such as a JSON string, may contain marker texts.

    Args:
        starts: Beginnings of calls.
        calls: Parser of the calls.
    """

    def __init__(self, starts: Sequence[str], calls: Parser) -> None:
        self._starts = tuple(starts)
        self._calls = calls
        self._held = ""  # text until the kind is known
        self._called: bool | None = None

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that the parser must see."""
        return self._calls.visible

    @property
    def calls(self) -> bool:
        """Whether the last text is within a call."""
        return bool(self._called) and self._calls.calls

    def feed(self, text: str) -> list[Piece]:
        """Parse more text; return the pieces that are certain."""
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
        """Return the held pieces: the output has ended."""
        if self._called:
            return self._calls.flush()
        return [Piece(PieceKind.CONTENT, self._held)] if self._held else []
