"""Tokens that are markers, among texts spelt like them, where a grammar separates the two."""

from collections.abc import Collection

from octavo.router.text.markers import first_match, possible_start

BREAK = "\udc00"
"""Put into a text that is spelt like a marker. No text has it: it is half of a character."""


class SpelledMarkers:
    """Breaks texts that are spelt like markers, so that a parser does not take them for any.

    Args:
        markers: Spellings of the tokens that are markers.
    """

    __slots__ = ("_held", "_markers")

    def __init__(self, markers: Collection[str]) -> None:
        self._markers = tuple(markers)
        self._held = ""  # may become a marker's text

    def feed(self, text: str, marker: str = "") -> str:
        """Return text for a parser.

        Args:
            text: The next text of the output, which ends with that of `marker`.
            marker: The token that it ends with, if that is a marker.
        """
        if marker:
            text = text.removesuffix(marker)
            return self._broken(text) + self.flush() + marker
        return self._broken(text)

    def flush(self) -> str:
        """Return the text that was held back: no ordinary text follows."""
        text, self._held = self._held, ""
        return text

    def _broken(self, text: str) -> str:
        left, parts = self._held + text, []
        while (match := first_match(left, self._markers)) is not None:
            start, marker = match
            parts += [left[:start], marker[0], BREAK, marker[1:]]
            left = left[start + len(marker) :]
        keep = len(left) - possible_start(left, self._markers)
        self._held = left[keep:]
        return "".join([*parts, left[:keep]])


def mended(text: str) -> str:
    """Return a parser's text as the output has it."""
    return text.replace(BREAK, "")
