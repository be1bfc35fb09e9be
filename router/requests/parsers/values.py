"""JSON values as outputs have them."""

import json
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def json_types(value: Any) -> frozenset[str]:  # noqa: ANN401 - any JSON
    """Return the names that JSON Schema has for a value's type."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"})
    if isinstance(value, str):
        return frozenset({"string"})
    return frozenset({"object"} if isinstance(value, Mapping) else {"array"})


def types_of_json(text: str) -> frozenset[str]:
    """Return the types of the value that a text is in JSON; empty if it is none.

    Numbers may be of any length and size, also those that Python does not read.
    """
    if _NUMBER.fullmatch(text):
        return json_types(1.0 if set(text) & set(".eE") else 1)
    try:
        return json_types(json.loads(text, parse_int=str, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return frozenset()


def json_text(value: Any) -> str:  # noqa: ANN401 - any JSON
    """Return a value as JSON that UTF-8 can encode: halves of surrogate pairs stay escaped.

    Raises:
        ValueError: It has a number that is not finite.
        TypeError: JSON has no such value.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _encodable(text) else json.dumps(value, allow_nan=False)


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
