"""Stop strings: where a growing text ends, without showing a part of what ends it."""

from collections.abc import Sequence

from octavo.router.text.markers import first_match, possible_start


class StopStrings:
    """Watches the text of one output for the first of its stop strings.

    Text that may be the beginning of a stop string is held back until it is
    known not to be. Of several that one `feed` completes, the one that starts
    first wins, and of those that start together the shortest, which was
    complete before the others.

    Args:
        strings: The stop strings; none is empty.
        include: Whether the string found is part of the text.

    Attributes:
        found: The string that ended the text; None: none has.
        hidden: Characters of the text fed that are not shown, or not yet.
    """

    __slots__ = ("_held", "_include", "_strings", "found", "hidden")

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._include = include
        self._held = ""
        self.found: str | None = None
        self.hidden = 0

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take more text and return what can be shown of all that came.

        Args:
            text: The text behind what was fed before.
            armed: If False, strings that end in `text` are passed over. Those
                that only begin in it count, if they end in armed text.
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
        """Return the text that was held back: the output ended for another reason."""
        held, self._held, self.hidden = self._held, "", 0
        return held
