"""Stop strings: where a growing text ends, without showing a part of what ends it."""

from collections.abc import Sequence


class StopStrings:
    """Watches the text of one output for the first of its stop strings.

    Text that may be the beginning of a stop string is held back until it is
    known not to be. Of several that one `feed` completes, the one that starts
    first wins, and of those that start together the shortest, which was
    complete before the others.

    Args:
        strings: What to look for; none is empty.
        include: Whether the string found is part of the text.
    """

    __slots__ = ("_held", "_include", "_longest", "_strings", "found")

    def __init__(self, strings: Sequence[str], *, include: bool = False) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._include = include
        self._held = ""
        self.found: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Take more text and return what can be shown of all that came.

        Args:
            text: What follows the text fed before.
            armed: If False, strings that end in `text` are passed over. Those
                that only begin in it count, if they end in armed text.
        """
        if not self._strings:
            return text
        text = self._held + text
        if armed and (match := self._first_match(text)) is not None:
            start, self.found = match
            self._held = ""
            return text[: start + len(self.found)] if self._include else text[:start]
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """Return what was held back: the output ended for another reason."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """Return start and string of the first stop string in `text`, if one is there."""
        found = [(text.find(string), len(string), string) for string in self._strings]
        start, _, string = min((f for f in found if f[0] >= 0), default=(-1, 0, ""))
        return None if start < 0 else (start, string)

    def _possible_start(self, text: str) -> int:
        """Return the length of the longest end of `text` that may begin a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(len(s) > length and s.startswith(end) for s in self._strings):
                return length
        return 0
