"""Stop strings: find the end of a growing text, and never show a part of one."""

from collections.abc import Sequence

from octavo.router.text.markers import first_match, possible_start


class StopStrings:
    """Searches the text of one output for its first stop string.

    Text that may begin a stop string is held back until that is decided. If one `feed` completes
    several stop strings, the one that starts first wins; among equal starts, the shortest, which
    was complete first.

    Args:
        strings: Stop strings, all non-empty.
        include: Whether the text includes the stop string.

    Attributes:
        found: Stop string that ended the text, if any.
        hidden: Number of characters that are held back or hidden.
    """

    __slots__ = ("_held", "_include", "_strings", "found", "hidden")

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""
        self.found: str | None = None
        self.hidden = 0

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Add text; return the text that can be shown now.

        Args:
            text: The text that follows the last call's.
            armed: Whether strings that end in `text` count. If False, those that only begin in it
                still count if they end in armed text.
        """
        if not self._strings:
            return text
        text = self._held + text
        if armed and (match := first_match(text, self._strings)) is not None:
            start, self.found = match
            self._held = ""
            end = start + len(self.found) if self._include else start
        else:
            end = len(text) - possible_start(text, self._strings)
            self._held = text[end:]
        self.hidden = len(text) - end
        return text[:end]

    def flush(self) -> str:
        """Return the held text: the output ended for another reason."""
        held, self._held, self.hidden = self._held, "", 0
        return held
