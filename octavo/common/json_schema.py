"""Traverse the parts of a JSON Schema."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

MAPS = ("properties", "patternProperties")
"""Keywords whose value maps names to schemas."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose value is a list of schemas."""
SINGLES = ("items", "additionalItems", "additionalProperties")
"""Keywords whose value is a schema; that of `items` may also be a list."""

CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Control characters that JSON writes as Unicode escapes, and DEL."""
CONTROL_ESCAPE = re.compile(
    r"\\(?:x(?:[01][0-9a-fA-F]|7[fF]|\{)|u(?:00[01]|007[fF]|\{)|[0-7]|c[A-Za-z]|[vae])"
)
"""Regular expression escapes that may match one of them."""
INDEX = re.compile("0|[1-9][0-9]{0,9}")
"""Index of a list entry in a JSON Pointer."""
CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)


class Pointer:
    """A JSON Pointer as a URI fragment, converted to text only when shown.

    Converting each would be slow: a megabyte-long name may contain a hundred thousand schemas.

    Args:
        parent: Pointer to the parent.
        parts: Unescaped parts after the parent.
    """

    __slots__ = ("parent", "parts")

    def __init__(self, parent: "Pointer | str", *parts: str) -> None:
        self.parent = parent
        self.parts = parts

    def __str__(self) -> str:
        parts: list[str] = []
        at: Pointer | str = self
        while isinstance(at, Pointer):
            parts += (escape(part) for part in reversed(at.parts))
            at = at.parent
        return "/".join([at, *reversed(parts)])


LocatedSchema = tuple[Pointer, Mapping[str, Any]]
"""A schema with its pointer."""


def subschemas(schema: object) -> Iterator[LocatedSchema]:
    """Yield a schema and all subschemas that apply, also by `$ref`, except booleans.

    Each is yielded once, regardless of the number and spelling of references to it.
    """
    seen: set[int] = set()
    left: list[tuple[Pointer, object]] = [(Pointer("#"), schema)]
    while left:
        pointer, subschema = left.pop()
        if not isinstance(subschema, Mapping) or id(subschema) in seen:
            continue
        seen.add(id(subschema))
        yield pointer, subschema
        left += reversed(list(_inside(pointer, subschema)))
        reference = subschema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            left.append((Pointer(reference), resolve(schema, reference)))


def has_control(keyword: str, value: object) -> bool:
    """Return whether a keyword's value requires a control character.

    Outputs cannot contain one: JSON allows it only as a Unicode escape.
    """
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
    """Return whether a regular expression has a control character, except in larger classes."""
    rest = CLASS.sub(lambda found: "" if _is_large(found[0]) else found[0], pattern)
    rest = rest.replace(r"\\", "")  # an escaped backslash
    return bool(CONTROL.search(rest) or CONTROL_ESCAPE.search(rest))


def _is_large(characters: str) -> bool:
    """Return whether a class certainly has several characters: negated, or with a range."""
    low, dash, high = characters[1:-1].partition("-")
    return characters.startswith("[^") or bool(dash and low and high and low != high)


def _inside(pointer: Pointer, schema: Mapping[str, Any]) -> Iterator[tuple[Pointer, object]]:
    for keyword in MAPS:
        if isinstance(members := schema.get(keyword), Mapping):
            for name, member in members.items():
                yield Pointer(pointer, keyword, name), member
    for keyword in (*LISTS, "items"):
        if isinstance(members := schema.get(keyword), list):
            for i, member in enumerate(members):
                yield Pointer(pointer, keyword, str(i)), member
    for keyword in SINGLES:
        yield Pointer(pointer, keyword), schema.get(keyword)


def escape(name: str) -> str:
    """Escape a name for a JSON Pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def resolve(schema: object, reference: str) -> object:
    """Return the value that a reference within the document points to, or None."""
    value = schema
    for name in names(reference):
        value = member(value, name)
    return value


def names(reference: str) -> list[str]:
    """Return the names in a reference within the document."""
    parts = unquote(reference).split("/")[1:]
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def member(value: object, name: str) -> object:
    """Return a member of an object or a list by name, or None."""
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, list) and INDEX.fullmatch(name) and int(name) < len(value):
        return value[int(name)]
    return None
