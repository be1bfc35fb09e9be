"""Calls whose arguments are texts between tags, made JSON by the tool's schema."""

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.router.requests.parsers.marked_calls import Call
from octavo.router.requests.parsers.parser import Buffer, Kind, Piece

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON Schema of each tool's arguments, by the tool's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of a family.

    Attributes:
        name_end: What ends the name; empty: the first argument or the end does.
        key_open: What begins an argument, and its name.
        key_close: What ends the argument's name.
        value_open: What begins the value; empty: it follows the name at once.
        value_close: What ends the value.
        end: What ends the call.
        trim: Whether a line end at either side of a value is not part of it.
        attributes: Behind the argument's name in its tag, before `value_open`, what says that
            the value is a string ("yes") or JSON ("no"); None: the schema alone does.
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

    Arguments that are strings by the schema are given as they come, others when they are complete.

    Args:
        tags: Those of the family.
        schemas: The tools' schemas.
    """

    def __init__(self, tags: Tags, schemas: Schemas) -> None:
        self._tags = tags
        self._schemas = schemas
        self._buffer = Buffer()
        self._text = ""  # of what is being read, as far as it is not given
        self._name = ""
        self._types: frozenset[str] = frozenset()
        self._count = 0
        self._started = False  # the value has begun
        self._step: Callable[[list[Piece]], bool] = self._in_name
        self._done = False

    def feed(self, text: str, pieces: list[Piece]) -> str | None:
        """Take text; return what is behind the call when it is complete."""
        self._buffer.add(text)
        while not self._done:
            if not self._step(pieces):
                return None
        return self._buffer.rest()

    def flush(self, pieces: list[Piece]) -> None:
        """End a call that is not complete; its arguments stay cut off."""

    def _until(self, *markers: str) -> str | None:
        """Read up to a marker; return it if it has come."""
        text, marker = self._buffer.until(tuple(filter(None, markers)))
        self._text += text
        return marker

    def _in_name(self, pieces: list[Piece]) -> bool:
        tags = self._tags
        marker = self._until(tags.name_end or tags.key_open, tags.end)
        if marker is None:
            return False
        self._name, self._text = self._text.strip(), ""
        pieces.append(Piece(Kind.CALL, self._name))
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
            pieces.append(Piece(Kind.ARGUMENTS, "}" if self._count else "{}"))
            self._done = True
        elif marker == self._tags.key_open:
            self._step = self._in_key
        else:
            self._step = self._in_between

    def _in_key(self, pieces: list[Piece]) -> bool:
        if self._until(self._tags.key_close) is None:
            return False
        key, self._text = self._text.strip(), ""
        self._types = argument_types(self._schemas.get(self._name, {}), key)
        pieces.append(Piece(Kind.ARGUMENTS, f"{', ' if self._count else '{'}{json.dumps(key)}: "))
        self._count += 1
        self._started = False
        self._step = self._before_value if self._tags.value_open else self._in_value
        return True

    def _before_value(self, _: list[Piece]) -> bool:
        if self._until(self._tags.value_open) is None:
            return False
        if self._tags.attributes is not None:
            string, other = self._tags.attributes
            if string in self._text:
                self._types = frozenset({"string"})
            elif other in self._text:
                self._types = self._types - {"string"}
        self._text = ""
        self._step = self._in_value
        return True

    def _in_value(self, pieces: list[Piece]) -> bool:
        close = self._tags.value_close
        marker = self._until(f"\n{close}", close) if self._tags.trim else self._until(close)
        if self._types == {"string"}:
            self._give(pieces)
        if marker is None:
            return False
        if self._types == {"string"}:
            pieces.append(Piece(Kind.ARGUMENTS, '"' if self._started else '""'))
        else:
            text = self._text.removeprefix("\n") if self._tags.trim else self._text
            pieces.append(Piece(Kind.ARGUMENTS, as_json(text, self._types)))
        self._text = ""
        self._step = self._in_between
        return True

    def _give(self, pieces: list[Piece]) -> None:
        """Give what there is of a string."""
        text, self._text = self._text, ""
        if not text:
            return
        if not self._started:
            self._started = True
            text = text.removeprefix("\n") if self._tags.trim else text
            pieces.append(Piece(Kind.ARGUMENTS, '"'))
        if text:
            pieces.append(Piece(Kind.ARGUMENTS, json.dumps(text, ensure_ascii=False)[1:-1]))


def argument_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that an argument may have by a tool's schema; empty: unknown."""
    properties = schema.get("properties")
    return _types(properties.get(key)) if isinstance(properties, Mapping) else frozenset()


def _types(schema: Any) -> frozenset[str]:  # noqa: ANN401 - any JSON
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(t for t in declared if isinstance(t, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if isinstance(values, list) and values and all(isinstance(v, str) for v in values):
        return frozenset({"string"})
    unions = [s for name in ("anyOf", "oneOf") for s in schema.get(name) or []]
    return frozenset().union(*map(_types, unions))


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: what its text stands for if its types allow that, else a string."""
    for read in (json.loads, ast.literal_eval):  # some models write True and None
        try:
            value = read(text.strip())
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        if not isinstance(value, str) and ("string" not in types or _names(value) & types):
            return written
        break
    return json.dumps(text, ensure_ascii=False)


def _names(value: Any) -> frozenset[str]:  # noqa: ANN401 - any JSON
    """Return the names that JSON Schema has for a value's type."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    return frozenset({"object"} if isinstance(value, dict) else {"array"})
