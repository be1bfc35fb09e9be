"""Tells marker tokens from texts that only look like them, where a grammar does so too."""

from collections.abc import Collection

from octavo.router.text.markers import first_match, possible_start

BREAK = "\udc00"
"""Character inserted into texts that look like markers; half a surrogate, so no text has it."""


class SpelledMarkers:
    """Breaks up texts that look like markers, so that a parser does not see them as such.

    Args:
        markers: Spellings of the marker tokens.
    """

    __slots__ = ("_held", "_markers")

    def __init__(self, markers: Collection[str]) -> None:
        self._markers = tuple(markers)
        self._held = ""  # text that may become a marker's spelling

    def feed(self, text: str, marker: str = "") -> str:
        """Return text for a parser.

        Args:
            text: The next text of the output, which ends with `marker`.
            marker: The token at the end, if it is a marker.
        """
        if marker:
            text = text.removesuffix(marker)
            return self._broken(text) + self.flush() + marker
        return self._broken(text)

    def flush(self) -> str:
        """Return the held text: no ordinary text follows."""
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
    """Remove the inserted characters from a parser's text."""
    return text.replace(BREAK, "")
