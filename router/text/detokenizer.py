"""Incremental detokenization that never splits or garbles a character.

The concatenated text equals the text of decoding all tokens at once. A token's text may still
change in these cases:

- A byte-level token may end within a character; its text then ends with U+FFFD until the next
  tokens complete it.
- With byte fallback ("<0xE2>"), bytes in a row are decoded together and all
  become U+FFFD if they are not valid, so none is final before the row ends.
- Some decoders drop the space in front of the very first token.

Otherwise a token's text depends only on its not being the first. So it is decoded once after a
fixed token, the anchor, whose own text is then removed, and cached.

`tokenizers.DecodeStream` is not used: it is no faster, never returns the end of a text that ends
within a character, and with byte fallback garbles or rejects invalid bytes.
"""

import re
from collections.abc import Callable, Sequence
from enum import IntEnum

REPLACEMENT = "\ufffd"
MAX_HELD = 3
"""Maximum held characters: an incomplete character's 3 bytes may each show as U+FFFD."""
MAX_PENDING = 32
"""Maximum tokens that wait for a character to be complete."""
LONG_ROW = 64
"""Length of a row of fallback bytes after which valid bytes are shown before its end."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenKind(IntEnum):
    """The kind of a token, which decides how to decode it."""

    TEXT = 0
    BYTE = 1  # one byte of a character
    SKIPPED = 2  # special or unused token


class Pieces:
    """The texts of a vocabulary's tokens, shared by all outputs of a model.

    Args:
        decode: Returns the text of tokens, without special ones.
        tokens: Spelling of every token, by id; None for unused ids.
        special: Ids of the special tokens.
        byte_fallback: Whether tokens such as "<0xE2>" stand for bytes.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        tokens: Sequence[str | None],
        special: frozenset[int],
        *,
        byte_fallback: bool,
    ) -> None:
        self._decode = decode
        self._tokens = tokens
        self._special = special
        self._kinds = bytes(
            TokenKind.SKIPPED
            if token is None or i in special
            else TokenKind.BYTE
            if byte_fallback and _BYTE_TOKEN.fullmatch(token)
            else TokenKind.TEXT
            for i, token in enumerate(tokens)
        )
        self._anchor = self._find_anchor()
        self._anchor_length = 0 if self._anchor is None else len(decode([self._anchor]))
        self._alone: dict[int, str | None] = {}

    @property
    def anchored(self) -> bool:
        """Whether the vocabulary has an anchor token."""
        return self._anchor is not None

    def kind(self, token_id: int) -> int:
        """Return the token's `TokenKind`."""
        return self._kinds[token_id] if token_id < len(self._kinds) else TokenKind.SKIPPED

    def text(self, token_ids: Sequence[int], *, first: bool) -> str:
        """Return the text of tokens, at the start of an output or after other text."""
        if first or self._anchor is None:
            return self._decode(token_ids)
        return self._decode([self._anchor, *token_ids])[self._anchor_length :]

    def alone(self, token_id: int) -> str | None:
        """Return a token's text after other text; None if later tokens may change it."""
        try:
            return self._alone[token_id]
        except KeyError:
            pass
        text: str | None = None
        if self._anchor is not None and self.kind(token_id) == TokenKind.TEXT:
            text = self.text([token_id], first=False)
            if text.endswith(REPLACEMENT):
                text = None
        self._alone[token_id] = text
        return text

    def spelling(self, token_id: int) -> str:
        """Return a token's spelling in the vocabulary; empty if there is no such token."""
        return self._tokens[token_id] or "" if token_id < len(self._tokens) else ""

    def byte(self, token_id: int) -> bytes:
        """Return the byte of a BYTE token."""
        return bytes([int(self.spelling(token_id)[3:-1], 16)])

    def special_text(self, token_id: int) -> str:
        """Return a special token's spelling; empty for other tokens."""
        return self._tokens[token_id] or "" if token_id in self._special else ""

    def _find_anchor(self) -> int | None:
        for token_id, kind in enumerate(self._kinds):
            if kind == TokenKind.TEXT:
                text = self._decode([token_id])
                if text.isascii() and text.isalnum():
                    return token_id
        return None


class Detokenizer:
    """The text of one output, decoded token by token.

    Args:
        pieces: The vocabulary.
        keep_special: Whether the text contains special tokens.
        visible: Special tokens that the text contains in any case.
    """

    __slots__ = ("_first", "_keep_special", "_pending", "_pieces", "_shown", "_visible")

    def __init__(
        self,
        pieces: Pieces,
        *,
        keep_special: bool = False,
        visible: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._visible = visible
        self._keep_special = keep_special
        self._first = True  # whether nothing but pending tokens was decoded
        self._pending: list[int] = []  # tokens with unshown text
        self._shown = 0  # shown characters of their text

    def feed(self, token_id: int) -> str:
        """Add the next token; return the text that is now final, perhaps none."""
        if not (self._pending or self._first):
            text = self._pieces.alone(token_id)
            if text is not None:
                return text
        kind = self._pieces.kind(token_id)
        if kind == TokenKind.SKIPPED:
            shown = self._keep_special or token_id in self._visible
            return self._show_special(token_id) if shown else ""
        self._pending.append(token_id)
        if kind == TokenKind.BYTE:
            return self._show_long_row()
        return self._show()

    def flush(self) -> str:
        """Return the remaining text: no token follows."""
        return self._show(final=True) if self._pending else ""

    def _show_special(self, token_id: int) -> str:
        """Return a special token's spelling; no character continues after it."""
        special = self._pieces.special_text(token_id)
        text = self.flush() + special
        if special and self._pieces.anchored:
            self._first = False
            self._pending.clear()
            self._shown = 0
        return text

    def _show(self, *, final: bool = False) -> str:
        text = self._pieces.text(self._pending, first=self._first)
        held = 0 if final else min(len(text) - len(text.rstrip(REPLACEMENT)), MAX_HELD)
        end = max(len(text) - held, self._shown)
        new, self._shown = text[self._shown : end], end
        if not held:
            self._settle(text)
        elif len(self._pending) > MAX_PENDING:
            self._shorten(text)
        return new

    def _show_long_row(self) -> str:
        # Checking every byte would cost quadratic time in a long row; a character has at most four.
        if len(self._pending) < LONG_ROW or len(self._pending) % LONG_ROW >= 4:
            return ""
        text = self._pieces.text(self._pending, first=self._first)
        return "" if REPLACEMENT in text else self._show()

    def _settle(self, text: str) -> None:
        """Drop the pending tokens once all their text is shown.

        Tokens without text stay: else the next ones would be decoded as if after other text, and
        keep a leading space that the decoder drops.
        """
        if text and self._pieces.anchored:
            self._first = False
            self._pending.clear()
            self._shown = 0

    def _shorten(self, text: str) -> None:
        """Drop all but the last pending tokens, if some of their text is still held."""
        held = text[self._shown :]
        tail = self._pending[-MAX_PENDING // 4 :]
        tail_text = self._pieces.text(tail, first=False)
        if self._pieces.anchored and tail_text.endswith(held):
            self._first = False
            self._pending = tail
            self._shown = len(tail_text) - len(held)
