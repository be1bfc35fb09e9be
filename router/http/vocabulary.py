"""Tokens as log-probabilities show them: text and bytes."""

from dataclasses import dataclass

from octavo.router.text.detokenizer import Pieces, TokenKind


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes stand for themselves; the others, in order, are written as
    the characters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class Token:
    """The text and bytes of a token.

    Attributes:
        text: Its text; U+FFFD stands for what is not a whole character.
        encoded: Its bytes, a part of a character's or not.
    """

    text: str
    encoded: bytes

    @property
    def name(self) -> str:
        """How the older form of log-probabilities names it: by its bytes where it is no text."""
        if self.encoded == self.text.encode():
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.encoded)


class Vocabulary:
    """The tokens of one model.

    Args:
        pieces: Their texts.
        eos_token_ids: Tokens that end an output and are no part of it.
    """

    def __init__(self, pieces: Pieces, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self.pieces = pieces
        self._tokens: dict[int, Token] = {}

    def token(self, token_id: int) -> Token:
        """Return a token's name and bytes, as log-probabilities show them."""
        if token_id not in self._tokens:
            self._tokens[token_id] = self._make(token_id)
        return self._tokens[token_id]

    def _make(self, token_id: int) -> Token:
        pieces = self.pieces
        kind = pieces.kind(token_id)
        spelling = pieces.spelling(token_id)
        if kind == TokenKind.SKIPPED:
            return Token(spelling, spelling.encode())
        if kind == TokenKind.BYTE:
            encoded = pieces.byte(token_id)
            return Token(encoded.decode(errors="replace"), encoded)
        text = pieces.alone(token_id)
        if text is None:  # a part of a character, as only byte-level vocabularies have
            encoded = bytes(_BYTES[c] for c in spelling if c in _BYTES)
            return Token(encoded.decode(errors="replace"), encoded)
        return Token(text, text.encode())
