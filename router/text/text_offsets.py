"""Where in an output's text each of its tokens begins."""

import codecs

from octavo.router.text.detokenizer import Detokenizer, Pieces, TokenKind


class TextOffsets:
    """Counts the characters before each token of one output.

    A token that begins within a character is where that character is, and one without text is
    where it would be.

    Args:
        pieces: The vocabulary.
        before: Characters before the output.
        keep_special: Whether special tokens are in the text.
    """

    def __init__(self, pieces: Pieces, before: int = 0, *, keep_special: bool = False) -> None:
        self._pieces = pieces
        self._detokenizer = Detokenizer(pieces, keep_special=keep_special)
        self._shown = before
        # The detokenizer holds a row of bytes until its end; its whole characters count before.
        self._row = codecs.getincrementaldecoder("utf-8")("replace")
        self._in_row = 0

    def next(self, token_id: int) -> int:
        """Take the next token and return the number of characters before it."""
        if self._pieces.kind(token_id) != TokenKind.BYTE:
            # What follows a row shows the row, too; its own text comes behind.
            place = self._shown + self._in_row
            if shown := self._detokenizer.feed(token_id):
                self._shown += len(shown)
                self._row.reset()
                self._in_row = 0
            return place
        place = self._shown + self._in_row
        self._in_row += len(self._row.decode(self._pieces.byte(token_id)))
        if shown := self._detokenizer.feed(token_id):  # of a long row
            self._shown += len(shown)
            self._in_row = 0
        return place
