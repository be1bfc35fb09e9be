"""Offset of each token in an output's text."""

import codecs

from octavo.router.text.detokenizer import Detokenizer, Pieces, TokenKind


class TextOffsets:
    """Counts the characters before each token of one output.

    A token that begins within a character has that character's offset, and one without text has the
    offset of the next text.

    Args:
        pieces: The vocabulary.
        before: Characters before the output.
        keep_special: Whether the text contains special tokens.
    """

    def __init__(self, pieces: Pieces, before: int = 0, *, keep_special: bool = False) -> None:
        self._pieces = pieces
        self._detokenizer = Detokenizer(pieces, keep_special=keep_special)
        self._shown = before
        # The detokenizer holds a row of bytes until its end; complete characters count earlier.
        self._row = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_row = 0

    def next(self, token_id: int) -> int:
        """Add the next token; return its offset."""
        if self._pieces.kind(token_id) != TokenKind.BYTE:
            # The token after a row releases the row's text, then its own.
            place = self._shown + self._in_row
            if shown := self._detokenizer.feed(token_id):
                self._shown += len(shown)
                self._row.reset()
                self._in_row = 0
            return place
        place = self._shown + self._in_row
        self._in_row += len(self._row.decode(self._pieces.byte(token_id)))
        if shown := self._detokenizer.feed(token_id):  # released early from a long row
            self._shown += len(shown)
            self._in_row = 0
        return place
