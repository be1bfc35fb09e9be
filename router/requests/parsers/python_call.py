"""Calls that are a list of Python calls: [get_weather(city="Paris"), now()]."""

import ast
import json
from typing import Any

from octavo.router.requests.parsers.marked_calls import Call
from octavo.router.requests.parsers.parser import Kind, Piece

MAX_LENGTH = 1 << 16
"""Characters; what is longer is content."""
_NAMES = {"true": True, "false": False, "null": None}
"""Words that some models take from JSON."""


class PythonCalls(Call):
    """A list of calls with named arguments, given when it is complete.

    What is not such a list is content.

    Args:
        bare: Whether nothing but the list itself says that it is one.
    """

    def __init__(self, *, bare: bool = False) -> None:
        self._bare = bare
        self._text = ""
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Take text; return what is behind the list when it is complete."""
        for i, character in enumerate(text):
            if self._ends(character):
                self._text += text[: i + 1]
                self._give(pieces)
                return text[i + 1 :]
        self._text += text
        if len(self._text) > MAX_LENGTH:
            pieces.append(Piece(Kind.CONTENT, self._text))
            return ""
        return None

    def flush(self, pieces: list[Piece]) -> None:
        """End a list that is not complete."""
        if self._bare:
            pieces.append(Piece(Kind.CONTENT, self._text))

    def _ends(self, character: str) -> bool:
        """Take a character; return whether it closes the list."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}":
            self._depth -= 1
            return self._depth <= 0
        return False

    def _give(self, pieces: list[Piece]) -> None:
        try:
            calls = list(map(_read, _list(self._text.strip())))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            pieces.append(Piece(Kind.CONTENT, self._text))
            return
        for name, arguments in calls:
            pieces += [Piece(Kind.CALL, name), Piece(Kind.ARGUMENTS, arguments)]


def _list(text: str) -> list[ast.expr]:
    tree = ast.parse(text, mode="eval").body
    if not isinstance(tree, ast.List) or not tree.elts:
        raise ValueError("no list of calls")
    return tree.elts


def _read(call: ast.expr) -> tuple[str, str]:
    """Return name and arguments of a call."""
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("arguments without names")
        arguments[keyword.arg] = _value(keyword.value)
    return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def _value(node: ast.expr) -> Any:  # noqa: ANN401 - any JSON
    match node:
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {str(_value(k)): _value(v) for k, v in zip(keys, values, strict=True) if k}
    return ast.literal_eval(node)
