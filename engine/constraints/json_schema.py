"""Finds the parts of a JSON Schema that cannot be served."""

import re
from collections.abc import Mapping

from octavo.common.json_schema import has_control, subschemas


def unenforceable(schema: object) -> str | None:
    """Return the part of a schema that compiles but would not be enforced, or None.

    llguidance allows a name outside `properties` twice, so it cannot count names. It drops
    characters of constants that JSON can write only with a Unicode escape.
    """
    for pointer, subschema in subschemas(schema):
        least = subschema.get("minProperties")
        others = subschema.get("additionalProperties") is not False or subschema.get(
            "patternProperties"
        )
        required = subschema.get("required")
        named = len(required) if isinstance(required, list) else 0
        if isinstance(least, int | float) and least > max(1, named + 1) and others:
            return (
                f"{pointer}/minProperties: it must be at most 1 more than the names in `required`,"
                " or additionalProperties false"
            )
        for keyword in ("const", "enum", "pattern", "patternProperties"):
            if keyword in subschema and has_control(keyword, subschema[keyword]):
                return f"{pointer}/{keyword}: control characters are not supported"
        options = subschema.get("x-guidance")
        for option in ("lenient", "coerce_one_of"):
            if isinstance(options, Mapping) and options.get(option):
                return f"{pointer}/x-guidance/{option}: it must not be true: outputs could be wrong"
    return None


def locate(schema: object, message: str) -> str:
    """Return llguidance's message about a schema, with the places in the schema."""
    keywords = re.search(r"Unimplemented keys: \[(.*)\]", message)
    if keywords:
        names = re.findall(r'"([^"]+)"', keywords[1])
        places = [f"{p}/{name}" for p, s in subschemas(schema) for name in names if name in s]
        return _at(places, f"not supported: {', '.join(names)}") if places else message
    format_ = re.search(r"Unknown format: (.*)", message)
    if format_:
        places = [f"{p}/format" for p, s in subschemas(schema) if s.get("format") == format_[1]]
        return _at(places, f"not supported: format {format_[1]!r}") if places else message
    return message


def _at(places: list[str], what: str) -> str:
    shown = ", ".join(sorted(places)[:3])
    more = len(places) - 3
    return f"{shown}{f' and {more} more places' if more > 0 else ''}: {what}"
