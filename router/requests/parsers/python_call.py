"""Calls as a list of Python calls: [get_weather(city="Paris"), now()]."""

import ast
import re
from typing import Any

from octavo.router.requests.parsers.marked_calls import Call
from octavo.router.requests.parsers.parser import Piece, PieceKind
from octavo.router.requests.parsers.values import json_text, types_of_json

MAX_LENGTH = 1 << 18
"""Maximum characters of a list of calls; longer text is returned as content."""
_NAMES = {"true": True, "false": False, "null": None}
"""JSON constants that some models write."""
_CALL = re.compile(r"(?P<name>[\w./:-]+)\s*\((?P<arguments>.*)\)", re.DOTALL)
_ARGUMENT = re.compile(r"(?P<name>[^\s()\[\]{}'\"=]+)\s*=(?P<value>.*)", re.DOTALL)


class PythonCalls(Call):
    """A list of calls with named arguments, emitted when complete.

    Other text is content.

    Args:
        bare: Whether no marker shows that the text is a list of calls.
    """

    def __init__(self, *, bare: bool = False) -> None:
        self._bare = bare
        self._text = ""
        self._scanner = _Scanner()

    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Parse more text; return the rest after the list once complete, else None."""
        for i, character in enumerate(text):
            if self._scanner.take(character) and character in ")]}" and self._scanner.depth <= 0:
                self._text += text[: i + 1]
                self._give(pieces)
                return text[i + 1 :]
        self._text += text
        if len(self._text) > MAX_LENGTH:
            pieces.append(Piece(PieceKind.CONTENT, self._text))
            return ""
        return None

    def flush(self, pieces: list[Piece]) -> None:
        """End an incomplete list."""
        if self._bare:
            pieces.append(Piece(PieceKind.CONTENT, self._text))

    def _give(self, pieces: list[Piece]) -> None:
        try:
            calls = list(map(_read, _listed(self._text.strip())))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pieces.append(Piece(PieceKind.CONTENT, self._text))
            return
        for name, arguments in calls:
            pieces += [Piece(PieceKind.CALL, name), Piece(PieceKind.ARGUMENTS, arguments)]


class _Scanner:
    """Tracks brackets and quotes.

    Attributes:
        depth: Number of open brackets.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._quote = ""
        self._escaped = False

    def take(self, character: str) -> bool:
        """Process a character; return whether it is outside strings."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
            return False
        if character in "\"'":
            self._quote = character
            return False
        self.depth += (character in "([{") - (character in ")]}")
        return True


def _split(text: str) -> list[str]:
    """Split at commas outside brackets and strings."""
    scanner, parts, start = _Scanner(), [], 0
    for i, character in enumerate(text):
        if scanner.take(character) and character == "," and not scanner.depth:
            parts.append(text[start:i])
            start = i + 1
    return [part for part in map(str.strip, [*parts, text[start:]]) if part]


def _listed(text: str) -> list[str]:
    calls = _split(text[1:-1]) if text[:1] == "[" and text[-1:] == "]" else []
    if not calls:
        raise ValueError("no list of calls")
    return calls


def _read(call: str) -> tuple[str, str]:
    """Return the name and arguments of a call.

    It is not parsed as Python, where names cannot contain hyphens or be keywords.
    """
    match = _CALL.fullmatch(call)
    if match is None:
        raise ValueError("no call")
    parts = _split(match["arguments"])
    if len(parts) == 1 and parts[0].startswith("**"):
        return match["name"], _mapping(parts[0][2:].strip())
    return match["name"], f"{{{', '.join(map(_argument, parts))}}}"


def _argument(part: str) -> str:
    """Return an argument as a member of a JSON object."""
    match = _ARGUMENT.fullmatch(part)
    if match is None:
        raise ValueError("an argument without a name")
    return f"{json_text(match['name'])}: {_json(match['value'].strip())}"


def _mapping(text: str) -> str:
    written = _json(text)
    if not written.startswith("{"):
        raise ValueError("no mapping")
    return written


def _json(text: str) -> str:
    """Return a value as JSON, which it may already be: literals of both languages agree."""
    return text if types_of_json(text) else json_text(_value(_parsed(text)))


def _parsed(text: str) -> ast.expr:
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr) -> Any:  # noqa: ANN401 - any JSON
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {str(_value(k)): _value(v) for k, v in zip(keys, values, strict=True) if k}
    return ast.literal_eval(node)
