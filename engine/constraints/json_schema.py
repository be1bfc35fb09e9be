"""Find the places of a JSON Schema at which it cannot be served."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAPS = ("properties", "patternProperties")
"""Keywords of a mapping from names to schemas."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords of a list of schemas."""
SINGLES = ("items", "additionalItems", "additionalProperties")
"""Keywords of one schema; `items` may also be a list."""

CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters that JSON writes as Unicode escapes, and DEL."""
CONTROL_ESCAPE = re.compile(
    r"\\(?:x(?:[01][0-9a-fA-F]|7[fF]|\{)|u(?:00[01]|007[fF]|\{)|[0-7]|c[A-Za-z]|[vae])"
)
"""An escape of a regular expression that may mean one of them."""
CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)
Place = tuple[str, Mapping[str, Any]]
"""A JSON Pointer, as a URI fragment, and the schema there."""


def subschemas(schema: object) -> Iterator[Place]:
    """Yield a schema and all those in it that apply, by `$ref` too; booleans are left out."""
    seen: set[str] = set()
    left: list[tuple[str, object]] = [("#", schema)]
    while left:
        pointer, found = left.pop()
        if not isinstance(found, Mapping) or pointer in seen:
            continue
        seen.add(pointer)
        yield pointer, found
        left += _inside(pointer, found)
        reference = found.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            left.append((reference, _resolve(schema, reference)))


def unenforceable(schema: object) -> str | None:
    """Return what a grammar would not hold an output to although it compiles, or None.

    llguidance lets a name that is not in `properties` occur twice, so it does not count names. It
    leaves characters out of constants that JSON cannot write without a Unicode escape.
    """
    for pointer, found in subschemas(schema):
        least = found.get("minProperties")
        others = found.get("additionalProperties") is not False or found.get("patternProperties")
        required = found.get("required")
        named = len(required) if isinstance(required, list) else 0
        if isinstance(least, int | float) and least > max(1, named + 1) and others:
            return (
                f"{pointer}/minProperties: it must be at most 1 more than the names in `required`,"
                " or additionalProperties false"
            )
        for keyword in ("const", "enum", "pattern", "patternProperties"):
            if keyword in found and _has_control(keyword, found[keyword]):
                return f"{pointer}/{keyword}: control characters are not supported"
        options = found.get("x-guidance")
        for option in ("lenient", "coerce_one_of"):
            if isinstance(options, Mapping) and options.get(option):
                return f"{pointer}/x-guidance/{option}: it must not be true: outputs could be wrong"
    return None


def _has_control(keyword: str, value: object) -> bool:
    """Return whether a keyword's value asks for a control character by itself."""
    if keyword == "pattern":
        return isinstance(value, str) and _matches_control(value)
    if keyword == "patternProperties":
        return isinstance(value, Mapping) and any(map(_matches_control, value))
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str) and CONTROL.search(part):
            return True
        if isinstance(part, Mapping):
            left += [*part, *part.values()]
        elif isinstance(part, list):
            left += part
    return False


def _matches_control(pattern: str) -> bool:
    """Return whether a regular expression has a control character outside of larger classes."""
    rest = CLASS.sub(lambda found: "" if _is_large(found[0]) else found[0], pattern)
    rest = rest.replace(r"\\", "")  # a backslash itself
    return bool(CONTROL.search(rest) or CONTROL_ESCAPE.search(rest))


def _is_large(characters: str) -> bool:
    """Return whether a class surely has several characters: it is negated or has a range."""
    low, dash, high = characters[1:-1].partition("-")
    return characters.startswith("[^") or bool(dash and low and high and low != high)


def locate(schema: object, message: str) -> str:
    """Return llguidance's message about a schema, with the places that it means."""
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


def _inside(pointer: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for keyword in MAPS:
        if isinstance(members := schema.get(keyword), Mapping):
            for name, member in members.items():
                yield f"{pointer}/{keyword}/{_escape(name)}", member
    for keyword in (*LISTS, "items"):
        if isinstance(members := schema.get(keyword), list):
            for i, member in enumerate(members):
                yield f"{pointer}/{keyword}/{i}", member
    for keyword in SINGLES:
        yield f"{pointer}/{keyword}", schema.get(keyword)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _resolve(schema: object, reference: str) -> object:
    """Return what a reference into the same document means; None if it is not there."""
    found = schema
    for part in unquote(reference).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping):
            found = found.get(name)
        elif isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found
