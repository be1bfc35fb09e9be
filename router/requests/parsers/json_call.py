"""Calls that are JSON objects: {"name": ..., "arguments": {...}}."""

import json
from collections.abc import Callable

from octavo.router.requests.parsers.marked_calls import Call
from octavo.router.requests.parsers.parser import Piece, PieceKind

NAMES = ("name",)
ARGUMENTS = ("arguments", "parameters")
OTHERS = ("id", "type")
"""Other keys that a call may have, which are ignored."""
SPACE = " \t\r\n"


class JsonValue:
    """Finds the end of a streamed JSON value without validating it."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_started")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._started = False

    def take(self, text: str, start: int) -> tuple[int, bool]:
        """Return the value's end in `text`, from `start` on, and whether it is complete.

        The character after a number or a word is not part of it.
        """
        for i in range(start, len(text)):
            character = text[i]
            if self._in_string:
                if self._string_ends(character) and not self._depth:
                    return i + 1, True
            elif character == '"':
                self._in_string = self._started = True
            elif character in "{[":
                self._depth += 1
                self._started = True
            elif character in "}]" and self._depth:
                self._depth -= 1
                if not self._depth:
                    return i + 1, True
            elif not self._depth and self._word_ends(character):
                return i, True
        return len(text), False

    def _string_ends(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
        return not self._in_string

    def _word_ends(self, character: str) -> bool:
        """Handle a character outside strings and brackets."""
        if character in SPACE:
            return self._started
        self._started = True
        return character in ",}]"


class JsonCall(Call):
    """A JSON object with the tool's name and its arguments, in any order.

    Arguments are streamed once the name is known. An object that is not a call becomes content as a
    whole.

    Args:
        bare: Whether no marker shows that the object is a call: then an incomplete object, or one
            with other keys, is content.
    """

    def __init__(self, *, bare: bool = False) -> None:
        self._bare = bare
        self._raw = ""  # all text, until it is known to be a call
        self._state: Callable[[str, int, list[Piece]], int] = self._open
        self._string = ""  # the key being read
        self._key = ""
        self._name: str | None = None
        self._value = JsonValue()
        self._text = ""  # the value being read, unless streamed
        self._arguments: str | None = None  # held until the name is known
        self._called = False
        self._streams = False
        self._done = False
        self._failed = False

    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Parse more text; return the rest after the call once complete, else None."""
        at = 0
        while at < len(text) and not (self._done or self._failed):
            end = self._state(text, at, pieces)
            if not self._called:
                self._raw += text[at:end]
            at = end
        if not (self._done or self._failed):
            return None
        self._end(pieces)
        return text[at:]

    def flush(self, pieces: list[Piece]) -> None:
        """End an incomplete call."""
        if self._called or not self._bare:
            return
        pieces.append(Piece(PieceKind.CONTENT, self._raw))

    def _open(self, text: str, at: int, _: list[Piece]) -> int:
        if text[at] == "{":
            self._state = self._before_key
        elif text[at] not in SPACE:
            self._failed = True
            return at
        return at + 1

    def _before_key(self, text: str, at: int, _: list[Piece]) -> int:
        character = text[at]
        if character == '"':
            self._value, self._string = JsonValue(), ""
            self._state = self._in_key
            return at
        if character == "}":
            self._done = True
        elif character not in SPACE and character != ",":
            self._failed = True
            return at
        return at + 1

    def _in_key(self, text: str, at: int, _: list[Piece]) -> int:
        end, complete = self._value.take(text, at)
        self._string += text[at:end]
        if complete:
            self._key = _decoded(self._string)
            self._state = self._colon
            self._failed = self._bare and self._key not in (*NAMES, *ARGUMENTS, *OTHERS)
        return end

    def _colon(self, text: str, at: int, _: list[Piece]) -> int:
        if text[at] == ":":
            self._state = self._before_value
        elif text[at] not in SPACE:
            self._failed = True
            return at
        return at + 1

    def _before_value(self, text: str, at: int, pieces: list[Piece]) -> int:
        if text[at] in SPACE:
            return at + 1
        self._value, self._text = JsonValue(), ""
        self._streams = self._key in ARGUMENTS and text[at] == "{"
        if self._streams and self._name is not None:
            self._call(pieces)
        self._state = self._in_value
        return at

    def _in_value(self, text: str, at: int, pieces: list[Piece]) -> int:
        end, complete = self._value.take(text, at)
        if self._streams and self._called:
            pieces.append(Piece(PieceKind.ARGUMENTS, text[at:end]))
        else:
            self._text += text[at:end]
        if complete:
            self._set(pieces)
            self._state = self._before_key
        return end

    def _set(self, pieces: list[Piece]) -> None:
        """Handle the complete value of a key."""
        if self._key in NAMES and self._name is None:
            name = _decoded(self._text)
            if not name:
                self._failed = True
                return
            self._name = name
            if self._arguments is not None:
                self._call(pieces)
        elif self._key in ARGUMENTS and not self._called:
            self._arguments = self._text if self._streams else _object(self._text)
            if self._name is not None:
                self._call(pieces)

    def _call(self, pieces: list[Piece]) -> None:
        """Emit the name, and the arguments so far."""
        assert self._name is not None
        self._called = True
        self._raw = ""
        pieces.append(Piece(PieceKind.CALL, self._name))
        if self._arguments is not None:
            pieces.append(Piece(PieceKind.ARGUMENTS, self._arguments))

    def _end(self, pieces: list[Piece]) -> None:
        if self._called:
            return
        if self._done and self._name is not None:
            self._arguments = self._arguments or "{}"
            self._call(pieces)
        elif self._raw.strip():
            pieces.append(Piece(PieceKind.CONTENT, self._raw if self._bare else self._raw.lstrip()))


class JsonCalls(Call):
    """A JSON list of calls, or a sequence of calls.

    Args:
        separator: Character between calls outside a list; empty: there is only one call.
        bare: See `JsonCall`.
    """

    def __init__(self, separator: str = "", *, bare: bool = False) -> None:
        self._separator = separator
        self._bare = bare
        self._listed: bool | None = None  # None: unknown
        self._call: JsonCall | None = None
        self._before = ""  # text before the first call, in case it is none
        self._first = True
        self._separated = False

    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Parse more text; return the rest after the calls once complete, else None."""
        while text:
            if self._call is not None:
                rest = self._call.feed(text, pieces)
                if rest is None:
                    return None
                self._call, text = None, rest
                if not self._listed and not self._separator:
                    return text
                continue
            character = text[0]
            if character in SPACE:
                text = text[1:]
            elif character == "[" and self._listed is None:
                self._listed, self._before, text = True, "[", text[1:]
            elif character == "{" and (self._first or self._separated):
                self._listed = bool(self._listed)
                self._call, self._first, self._separated = JsonCall(bare=self._bare), False, False
            elif self._listed and character == "]":
                return text[1:]
            elif not self._first and character == ("," if self._listed else self._separator):
                self._separated, text = True, text[1:]
            else:
                return self._give_up(text, pieces)
        return None

    def flush(self, pieces: list[Piece]) -> None:
        """End incomplete calls."""
        if self._call is not None:
            self._call.flush(pieces)

    def _give_up(self, text: str, pieces: list[Piece]) -> str:
        """Return the text, as it is not a call."""
        if self._first and self._before:
            pieces.append(Piece(PieceKind.CONTENT, self._before))
        return text


def _decoded(text: str) -> str:
    """Decode a JSON string; return an empty string if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _object(text: str) -> str:
    """Return the object in a value: some models encode it as a string, or omit it."""
    inner = _decoded(text).strip()
    return inner if inner.startswith("{") else "{}"


class ByFirst(Call):
    """A call whose first character shows its kind.

    Args:
        choose: Creates the parser for a first character; None: leave the text to the caller.
    """

    def __init__(self, choose: Callable[[str], Call | None]) -> None:
        self._choose = choose
        self._call: Call | None = None

    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Parse more text; return the rest after the call once complete, else None."""
        if self._call is None:
            text = text.lstrip()
            if not text:
                return None
            self._call = self._choose(text[0])
            if self._call is None:
                return text
        return self._call.feed(text, pieces)

    def flush(self, pieces: list[Piece]) -> None:
        """End an incomplete call."""
        if self._call is not None:
            self._call.flush(pieces)


def json_or(other: Callable[[], Call] | None = None) -> ByFirst:
    """Return the parser of a JSON object that is a call, or else another parser, if any."""
    return ByFirst(lambda first: JsonCall() if first == "{" else other and other())
