"""Walk through the parts of a JSON Schema."""

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
INDEX = re.compile("0|[1-9][0-9]{0,9}")
"""The place of a list's entry, as a JSON Pointer has it."""
CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]", re.DOTALL)


class Pointer:
    """A JSON Pointer, as a URI fragment; it is made a text only where it is shown.

    A name of a megabyte may be above a hundred thousand schemas.

    Args:
        parent: The pointer that it begins with.
        parts: The parts behind the parent, not escaped.
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
"""A schema and where it is."""


def subschemas(schema: object) -> Iterator[LocatedSchema]:
    """Yield a schema and all those in it that apply, by `$ref` too; booleans are left out.

    Each comes once, however often and in whichever spelling others refer to it.
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
    """Return whether a keyword's value asks for a control character by itself.

    Outputs cannot have it: JSON writes it with a Unicode escape alone.
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
    """Return whether a regular expression has a control character outside of larger classes."""
    rest = CLASS.sub(lambda found: "" if _is_large(found[0]) else found[0], pattern)
    rest = rest.replace(r"\\", "")  # a backslash itself
    return bool(CONTROL.search(rest) or CONTROL_ESCAPE.search(rest))


def _is_large(characters: str) -> bool:
    """Return whether a class surely has several characters: it is negated or has a range."""
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
    """Return a name as a JSON Pointer has it."""
    return name.replace("~", "~0").replace("/", "~1")


def resolve(schema: object, reference: str) -> object:
    """Return the value at a reference into the same document; None if it is not there."""
    value = schema
    for name in names(reference):
        value = member(value, name)
    return value


def names(reference: str) -> list[str]:
    """Return the names on the path of a reference into the same document."""
    parts = unquote(reference).split("/")[1:]
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def member(value: object, name: str) -> object:
    """Return the member of an object or a list by its name; None if there is none."""
    if isinstance(value, Mapping):
        return value.get(name)
    if isinstance(value, list) and INDEX.fullmatch(name) and int(name) < len(value):
        return value[int(name)]
    return None
