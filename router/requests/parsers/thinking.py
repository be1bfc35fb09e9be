"""Parser of reasoning between two markers, before the answer."""

from octavo.router.requests.parsers.parser import Buffer, Parser, Piece, PieceKind


class Thinking(Parser):
    """Parse reasoning up to a marker, and the rest with another parser.

    Line breaks next to markers are dropped. The opening marker counts only at an output's start;
    later it is text.

    Args:
        opening: Marker that begins reasoning.
        closing: Marker that ends reasoning.
        then: Parser of the rest; None: the rest is content.
        opened: Whether the prompt already begins reasoning.
    """

    def __init__(
        self, opening: str, closing: str, then: Parser | None, *, opened: bool = False
    ) -> None:
        self._opening = opening
        self._closing = closing
        self._then = then
        self._buffer = Buffer()
        self._unknown = True  # still at the output's start
        self._in_reasoning = opened
        self._begun = False  # whether reasoning was emitted
        self._lines = ""  # line breaks to drop if reasoning ends
        self._trims = False  # drop line breaks in the next text

    @property
    def reasons(self) -> bool:
        """Whether the last text is within reasoning."""
        return self._in_reasoning

    @property
    def calls(self) -> bool:
        """Whether the last text is within a call."""
        return self._then is not None and self._then.calls

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that the parser must see."""
        rest = frozenset() if self._then is None else self._then.visible
        return rest | {self._opening, self._closing}

    def feed(self, text: str) -> list[Piece]:
        """Parse more text; return the pieces that are certain."""
        self._buffer.add(text)
        if self._unknown and not self._begin():
            return []
        pieces: list[Piece] = []
        if self._in_reasoning:
            reasoning, marker = self._buffer.until((self._closing,))
            self._give(reasoning, pieces)
            if marker is None:
                return pieces
            self._in_reasoning = False
            self._trims = True
        self._pass_on(self._buffer.rest(), pieces)
        return pieces

    def flush(self) -> list[Piece]:
        """Return the held pieces: the output has ended."""
        pieces: list[Piece] = []
        if self._in_reasoning:
            self._give(self._buffer.rest(), pieces)
            if self._lines and self._begun:
                pieces.append(Piece(PieceKind.REASONING, self._lines))
            return pieces
        self._pass_on(self._buffer.rest(), pieces)
        if self._then is not None:
            pieces += self._then.flush()
        return pieces

    def _begin(self) -> bool:
        """Look for the opening marker; return False if more text is needed."""
        text = self._buffer.rest()
        start = text.lstrip()
        if start.startswith(self._opening):
            self._in_reasoning = True
            self._buffer.add(start.removeprefix(self._opening))
        else:
            self._buffer.add(text)
            if self._opening.startswith(start):
                return False
        self._unknown = False
        return True

    def _give(self, text: str, pieces: list[Piece]) -> None:
        text = self._lines + text
        if not self._begun:
            text = text.lstrip("\n")
        shown = text.rstrip("\n")
        self._lines = text[len(shown) :]
        if shown:
            self._begun = True
            pieces.append(Piece(PieceKind.REASONING, shown))

    def _pass_on(self, text: str, pieces: list[Piece]) -> None:
        if self._trims:
            text = text.lstrip("\n")
            self._trims = not text
        if not text:
            return
        if self._then is None:
            pieces.append(Piece(PieceKind.CONTENT, text))
        else:
            pieces += self._then.feed(text)
