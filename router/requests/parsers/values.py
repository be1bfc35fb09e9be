"""JSON values in outputs."""

import json
import re
from collections.abc import Mapping
from typing import Any

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def json_types(value: Any) -> frozenset[str]:  # noqa: ANN401 - any JSON
    """Return JSON Schema's names for a value's type."""
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
    """Return the types of a text's JSON value; empty if it is not JSON.

    Numbers may have any length and size, beyond Python's limits.
    """
    if _NUMBER.fullmatch(text):
        return json_types(1.0 if set(text) & set(".eE") else 1)
    try:
        return json_types(json.loads(text, parse_int=str, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return frozenset()


def json_text(value: Any) -> str:  # noqa: ANN401 - any JSON
    """Encode a value as JSON for UTF-8: unpaired surrogates stay escaped.

    Raises:
        ValueError: A number is not finite.
        TypeError: The value has no JSON form.
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
