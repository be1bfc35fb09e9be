"""Calls with arguments as text between tags, converted to JSON by the tool's schema."""

import ast
import json
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from octavo.router.requests.parsers.json_call import JsonValue
from octavo.router.requests.parsers.marked_calls import Call
from octavo.router.requests.parsers.parser import Buffer, Piece, PieceKind
from octavo.router.requests.parsers.tool_schema import argument_schema, types_of
from octavo.router.requests.parsers.values import json_text, types_of_json

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
Schemas = Mapping[str, Mapping[str, Any]]
"""JSON Schema of each tool's arguments, by tool name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of a model family.

    Attributes:
        name_end: Tag after the name; empty: the first argument or the end follows the name.
        key_open: Tag before an argument's name.
        key_close: Tag after an argument's name.
        value_open: Tag before a value; empty: the value follows the name.
        value_close: Tag after a value.
        end: Tag after the call.
        trim: Whether to drop a line break at both ends of a value.
        attributes: Texts after an argument's name in its tag that mark a string ("yes") or JSON
            ("no"); None: the schema alone decides.
    """

    name_end: str
    key_open: str
    key_close: str
    value_open: str = ""
    value_close: str
    end: str
    trim: bool
    attributes: tuple[str, str] | None = None


class TaggedCall(Call):
    """A name, and arguments between tags.

    String arguments are streamed, others are emitted when complete.

    Args:
        tags: The family's tags.
        schemas: The tools' schemas.
        held: Names of the tools whose schemas a grammar enforces: their objects and lists are valid
            JSON, and may contain the closing tag in a string.
    """

    def __init__(self, tags: Tags, schemas: Schemas, held: AbstractSet[str] = frozenset()) -> None:
        self._tags = tags
        self._schemas = schemas
        self._held = held
        self._value = JsonValue()
        self._buffer = Buffer()
        self._text = ""  # current text that was not emitted
        self._name = ""
        self._types: frozenset[str] = frozenset()
        self._count = 0
        self._started = False  # whether the value has begun
        self._structured = False  # may be an object or list, under a grammar
        self._step: Callable[[list[Piece]], bool] = self._in_name
        self._done = False

    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Parse more text; return the rest after the call once complete, else None."""
        self._buffer.add(text)
        while not self._done:
            if not self._step(pieces):
                return None
        return self._buffer.rest()

    def flush(self, pieces: list[Piece]) -> None:
        """End an incomplete call; its arguments stay truncated."""

    def _until(self, *markers: str) -> str | None:
        """Read up to a marker; return it if found."""
        text, marker = self._buffer.until(tuple(filter(None, markers)))
        self._text += text
        return marker

    def _in_name(self, pieces: list[Piece]) -> bool:
        tags = self._tags
        marker = self._until(tags.name_end or tags.key_open, tags.end)
        if marker is None:
            return False
        self._name, self._text = self._text.strip(), ""
        pieces.append(Piece(PieceKind.CALL, self._name))
        self._between(marker, pieces)
        return True

    def _in_between(self, pieces: list[Piece]) -> bool:
        marker = self._until(self._tags.key_open, self._tags.end)
        self._text = ""
        if marker is None:
            return False
        self._between(marker, pieces)
        return True

    def _between(self, marker: str, pieces: list[Piece]) -> None:
        if marker == self._tags.end:
            pieces.append(Piece(PieceKind.ARGUMENTS, "}" if self._count else "{}"))
            self._done = True
        elif marker == self._tags.key_open:
            self._step = self._in_key
        else:
            self._step = self._in_between

    def _in_key(self, pieces: list[Piece]) -> bool:
        if self._until(self._tags.key_close) is None:
            return False
        key, self._text = self._text.strip(), ""
        schema = self._schemas.get(self._name, {})
        self._types = types_of(argument_schema(schema, key), schema)
        self._structured = self._name in self._held and bool(self._types & {"object", "array"})
        pieces.append(
            Piece(PieceKind.ARGUMENTS, f"{', ' if self._count else '{'}{json.dumps(key)}: ")
        )
        self._count += 1
        self._started = False
        self._step = self._before_value if self._tags.value_open else self._value_begins
        return True

    def _before_value(self, _: list[Piece]) -> bool:
        if self._until(self._tags.value_open) is None:
            return False
        if self._tags.attributes is not None:
            string, other = self._tags.attributes
            if string in self._text:
                self._types = frozenset({"string"})
                self._structured = False
            elif other in self._text:
                self._types = self._types - {"string"}
                self._structured = self._name in self._held
        self._text = ""
        self._step = self._value_begins
        return True

    def _value_begins(self, _: list[Piece]) -> bool:
        """Check the start of a value that may be an object or a list."""
        self._step = self._in_value
        if not self._structured:
            return True
        text = self._buffer.rest()
        self._buffer.add(text)
        first = text.lstrip()[:1]
        if first and first in "{[":
            self._value = JsonValue()
            self._step = self._in_structure
        elif not first:
            self._step = self._value_begins
        return bool(first)

    def _in_structure(self, _: list[Piece]) -> bool:
        """Read an object or a list up to its end."""
        text = self._buffer.rest()
        end, complete = self._value.take(text, 0)
        self._text += text[:end]
        if complete:
            self._buffer.add(text[end:])
            self._step = self._in_value
        return complete

    def _in_value(self, pieces: list[Piece]) -> bool:
        close = self._tags.value_close
        marker = self._until(f"\n{close}", close) if self._tags.trim else self._until(close)
        if self._types == {"string"}:
            self._give(pieces)
        if marker is None:
            return False
        if self._types == {"string"}:
            pieces.append(Piece(PieceKind.ARGUMENTS, '"' if self._started else '""'))
        else:
            text = self._text.removeprefix("\n") if self._tags.trim else self._text
            pieces.append(Piece(PieceKind.ARGUMENTS, as_json(text, self._types)))
        self._text = ""
        self._step = self._in_between
        return True

    def _give(self, pieces: list[Piece]) -> None:
        """Emit the available part of a string."""
        text, self._text = self._text, ""
        if not text:
            return
        if not self._started:
            self._started = True
            text = text.removeprefix("\n") if self._tags.trim else text
            pieces.append(Piece(PieceKind.ARGUMENTS, '"'))
        if text:
            pieces.append(Piece(PieceKind.ARGUMENTS, json.dumps(text, ensure_ascii=False)[1:-1]))


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: parsed if its types allow that, else as a string."""
    plain = text.strip()
    json_types = types_of_json(plain) - {"string"}
    if json_types and ("string" not in types or json_types & types):
        return plain
    if "string" in types:
        word = _PYTHON_WORDS.get(plain)
        return (
            word if word and types_of_json(word) & types else json.dumps(text, ensure_ascii=False)
        )
    try:  # some models write Python constants
        value = ast.literal_eval(plain)
        return json.dumps(text, ensure_ascii=False) if isinstance(value, str) else json_text(value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
