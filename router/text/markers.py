"""Finds markers in growing text, and text that may become one."""

from collections.abc import Sequence


def first_match(text: str, markers: Sequence[str]) -> tuple[int, str] | None:
    """Return offset and text of the first marker in `text`, if any.

    Among markers at the same offset, return the shortest.
    """
    matches = [(start, len(m), m) for m in markers if (start := text.find(m)) >= 0]
    if not matches:
        return None
    start, _, marker = min(matches)
    return start, marker


def possible_start(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may begin a marker."""
    longest = max(map(len, markers), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(len(m) > length and m.startswith(end) for m in markers):
            return length
    return 0
