"""Calls made of a header with the tool's name, and a JSON object of arguments."""

from collections.abc import Callable

from octavo.router.requests.parsers.json_call import JsonValue
from octavo.router.requests.parsers.marked_calls import Call
from octavo.router.requests.parsers.parser import Buffer, Piece, PieceKind


class NamedCall(Call):
    """A header and a JSON object.

    Args:
        name: Returns the tool's name in a header.
        ends: Markers that end a call without arguments.
    """

    def __init__(self, name: Callable[[str], str], ends: tuple[str, ...] = ()) -> None:
        self._name = name
        self._ends = ends
        self._buffer = Buffer()
        self._header = ""
        self._value: JsonValue | None = None

    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Parse more text; return the rest after the call once complete, else None."""
        if self._value is None:
            self._buffer.add(text)
            header, marker = self._buffer.until(("{", *self._ends))
            self._header += header
            if marker is None:
                return None
            text = self._buffer.rest()
            pieces.append(Piece(PieceKind.CALL, self._name(self._header)))
            if marker != "{":
                pieces.append(Piece(PieceKind.ARGUMENTS, "{}"))
                return text
            self._value = JsonValue()
            text = marker + text
        end, complete = self._value.take(text, 0)
        if end:
            pieces.append(Piece(PieceKind.ARGUMENTS, text[:end]))
        return text[end:] if complete else None

    def flush(self, pieces: list[Piece]) -> None:
        """End an incomplete call: without a name there is nothing to emit."""
