"""Text and bytes of tokens, for log-probabilities."""

from dataclasses import dataclass

from octavo.router.text.detokenizer import Pieces, TokenKind


def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character of a byte-level vocabulary.

    Printable bytes map to themselves; the others, in order, to the characters from U+0100 on.
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
        text: The token's text; U+FFFD replaces incomplete characters.
        encoded: The token's bytes, which may be a part of a character.
    """

    text: str
    encoded: bytes

    @property
    def name(self) -> str:
        """The token in legacy log-probabilities: its text, or its bytes if it has no valid text."""
        if self.encoded == self.text.encode():
            return self.text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.encoded)


class Vocabulary:
    """The tokens of one model.

    Args:
        pieces: The tokens' texts.
        eos_token_ids: Tokens that end an output without being part of its text.
    """

    def __init__(self, pieces: Pieces, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_ids = eos_token_ids
        self.pieces = pieces
        self._tokens: dict[int, Token] = {}

    def token(self, token_id: int) -> Token:
        """Return a token's text and bytes."""
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
        if text is None:  # part of a character, only in byte-level vocabularies
            encoded = bytes(_BYTES[c] for c in spelling if c in _BYTES)
            return Token(encoded.decode(errors="replace"), encoded)
        return Token(text, text.encode())
