"""Remove the parts of a JSON Schema that a grammar cannot enforce.

The grammar is llguidance's. A keyword that it cannot enforce is removed or weakened, so that the
reduced schema accepts whatever the original does.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote

from octavo.common.json_schema import Pointer, has_control, member, names, resolve, subschemas
from octavo.router.requests.patterns import held

_UNSUPPORTED = {
    *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
    *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems"),
    *("propertyNames", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"),
}
_NEEDS = {
    "if": {"then", "else"},
    "then": {"if"},
    "else": {"if"},
    "minContains": {"contains"},
    "maxContains": {"contains"},
}
"""Keywords without effect unless another one is present."""
_MARKS = ("$dynamicAnchor", "$recursiveAnchor")
"""Keywords that constrain nothing, which llguidance rejects."""
FORMATS = {
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    "unknown",
}
"""String formats that the grammar enforces."""
ENCODINGS = {
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
}
"""Regular expressions for formats that llguidance does not know."""
_PREFIX = re.compile(r"\^([A-Za-z0-9_ -])(?![*?{])")
"""The start of an expression that fixes the first character."""
_NAMES_COUNTED = ("minProperties", "maxProperties")
_OF_OBJECTS = (
    *("properties", "patternProperties", "required", "additionalProperties"),
    *_NAMES_COUNTED,
)
_ALL_TYPES = ("array", "boolean", "null", "number", "object", "string")
_MAX_REFERENCES = 32
_MAX_NAMES = 16
"""Maximum number of properties to compare when distinguishing objects."""

MAX_PLACES = 64
"""Maximum number of unenforced parts to report."""
MAX_PLACE = 200
"""Maximum characters of a reported part."""

Schema: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LenientSchema:
    """A JSON Schema reduced to what a grammar can enforce.

    Attributes:
        schema: A schema that accepts whatever the original does.
        unenforced: JSON Pointers of the first removed or weakened parts; empty: both schemas accept
            the same.
    """

    schema: Mapping[str, Any]
    unenforced: tuple[str, ...] = ()


def lenient(schema: Mapping[str, Any]) -> LenientSchema:
    """Return the enforceable part of a JSON Schema; a too deep one stays unchanged."""
    try:
        copied: Schema = json.loads(json.dumps(schema))
    except RecursionError:
        return LenientSchema(schema)
    visited = [(pointer, part) for pointer, part in subschemas(copied)]
    reduction = _Reduction(schema, mixes=any(_mixes(part) for _, part in visited))
    branches = _Branches(schema)
    for pointer, part in visited:
        if "oneOf" in part and not branches.disjoint(part["oneOf"]):
            reduction.note(pointer, "oneOf")
    for pointer, part in visited:
        assert isinstance(part, dict)
        reduction.reduce(pointer, part)
    for pointer, part in visited:
        assert isinstance(part, dict)
        reduction.mend_reference(copied, pointer, part)
    return LenientSchema(copied, tuple(sorted(set(reduction.places))))


def exact(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema in llguidance's form; unchanged if that would lose a part."""
    reduced = lenient(schema)
    return schema if reduced.unenforced else reduced.schema


class _Reduction:
    """Removes keywords from schemas, and records their places.

    Args:
        whole: The original schema.
        mixes: Whether several parts of the schema describe the same object's properties.
    """

    def __init__(self, whole: Mapping[str, Any], *, mixes: bool) -> None:
        self._whole = whole
        self._mixes = mixes
        self._renamed: dict[int, list[str]] = {}  # new path of `oneOf`, by schema id
        self._first_letters: set[str] = set()  # of names in patterns
        self.places: list[str] = []

    def reduce(self, pointer: Pointer, schema: Schema) -> None:
        """Remove from one schema what a grammar cannot enforce."""
        for keyword in _MARKS:
            schema.pop(keyword, None)
        rules = {keyword for keyword in schema if _says_something(keyword, schema)}
        for keyword in _UNSUPPORTED & set(schema):
            if keyword in rules:
                self.note(pointer, keyword)
            del schema[keyword]
        for keyword in ("const", "enum"):
            if keyword in schema and has_control(keyword, schema[keyword]):
                self._leave_out(pointer, schema, keyword)
        self._reduce_strings(pointer, schema)
        self._reduce_names(pointer, schema)
        self._count_names(pointer, schema)
        self._join(schema)

    def mend_reference(self, reduced: Schema, pointer: Pointer, schema: Schema) -> None:
        """Update a reference whose target has moved; remove it if the target is gone."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return
        target: object = reduced
        path: list[str] = []
        for name in names(reference):
            moved = self._renamed.get(id(target)) if name == "oneOf" else None
            for part in moved or [name]:
                target = member(target, part)
                path.append(part)
        if target is None:
            if resolve(self._whole, reference) is not None:
                self._leave_out(pointer, schema, "$ref")
        elif path != names(reference):
            schema["$ref"] = quote(str(Pointer("#", *path)), safe="#/~")

    def note(self, pointer: Pointer, *names: str) -> None:
        """Record a place with an unenforced keyword."""
        if len(self.places) < MAX_PLACES:
            place = str(Pointer(pointer, *names)).encode(errors="replace").decode()
            shown = place if len(place) <= MAX_PLACE else f"{place[:MAX_PLACE]}..."
            self.places.append(shown)

    def _leave_out(self, pointer: Pointer, schema: Schema, keyword: str) -> None:
        del schema[keyword]
        self.note(pointer, keyword)

    def _reduce_strings(self, pointer: Pointer, schema: Schema) -> None:
        """Weaken or remove a pattern and a format that the grammar does not know."""
        pattern, form = schema.get("pattern"), schema.get("format")
        if isinstance(pattern, str):
            known = None if has_control("pattern", pattern) else held(pattern)
            if known is None:
                self._leave_out(pointer, schema, "pattern")
            elif not known.exact:
                schema["pattern"] = known.pattern
                self.note(pointer, "pattern")
        if isinstance(form, str) and form not in FORMATS:
            del schema["format"]
            if "string" in _types(schema):
                self.note(pointer, "format")
                if form in ENCODINGS and "pattern" not in schema:
                    schema["pattern"] = ENCODINGS[form]

    def _reduce_names(self, pointer: Pointer, schema: Schema) -> None:
        """Remove name patterns that the grammar cannot enforce, or not together with the others."""
        patterns = schema.get("patternProperties")
        if not isinstance(patterns, dict):
            return
        letters = self._first_letters if self._mixes else set[str]()
        out = [pattern for pattern in patterns if not self._holds_names(pattern, patterns, letters)]
        for pattern in out:
            del patterns[pattern]
            self.note(pointer, "patternProperties", pattern)
        if not patterns:
            del schema["patternProperties"]
        if out and schema.get("additionalProperties", True) not in (True, {}):
            self._leave_out(pointer, schema, "additionalProperties")

    def _holds_names(self, pattern: str, patterns: Mapping[str, Any], letters: set[str]) -> bool:
        """Return whether the grammar can enforce a name pattern: no name may match two patterns."""
        known = held(pattern)
        if known is None or not known.exact or has_control("pattern", pattern):
            return False
        if len(patterns) == 1 and not self._mixes:
            return True
        letter = _PREFIX.match(pattern)
        if letter is None or "|" in pattern or letter[1] in letters:
            return False
        letters.add(letter[1])
        return True

    def _count_names(self, pointer: Pointer, schema: Schema) -> None:
        """Remove limits on the number of properties that the grammar cannot count."""
        required = schema.get("required")
        listed = required if isinstance(required, list) else []
        names = {name for name in listed if isinstance(name, str)}
        one_more = len(names) + 1
        minimum, maximum = schema.get("minProperties", 0), schema.get("maxProperties", one_more)
        if not (isinstance(minimum, int) and isinstance(maximum, int)):
            return
        if 0 <= minimum < one_more:
            schema.pop("minProperties", None)  # `required` implies it
        counted = [keyword for keyword in _NAMES_COUNTED if keyword in schema]
        optional = set(_members(schema, "properties")) - names
        others = schema.get("additionalProperties") is not False or "patternProperties" in schema
        if self._mixes or (optional and (others or minimum > one_more or maximum != one_more)):
            for keyword in counted:
                self._leave_out(pointer, schema, keyword)
        elif others and minimum > one_more:
            schema["minProperties"] = one_more
            self.note(pointer, "minProperties")

    def _join(self, schema: Schema) -> None:
        """Turn `oneOf` into `anyOf`: llguidance can prove few branches disjoint."""
        branches = schema.get("oneOf")
        if not isinstance(branches, list):
            return
        del schema["oneOf"]
        if "anyOf" not in schema:
            schema["anyOf"] = branches
            self._renamed[id(schema)] = ["anyOf"]
            return
        every = schema.setdefault("allOf", [])
        if isinstance(every, list):
            self._renamed[id(schema)] = ["allOf", str(len(every)), "anyOf"]
            every.append({"anyOf": branches})


class _Branches:
    """Decides whether the branches of a `oneOf` exclude each other.

    Args:
        whole: The schema that contains the branches.
    """

    def __init__(self, whole: Mapping[str, Any]) -> None:
        self._whole = whole
        # References below another "$id" are not relative to the root.
        self._local = json.dumps(whole).count('"$id"') == ("$id" in whole)

    def disjoint(self, branches: object) -> bool:
        """Return whether branches are provably disjoint, by types or by a property's values."""
        if not isinstance(branches, list):
            return False
        targets = list(map(self._target, branches))
        types = [_types(target) for target in targets]
        objects = [one for one, its in zip(targets, types, strict=True) if its == {"object"}]
        counted = [*(its for its in types if its != {"object"}), *([{"object"}] if objects else [])]
        if sum(map(len, counted)) != len(set().union(*counted)):
            return False
        names = [*_members(objects[0], "properties")][:_MAX_NAMES] if objects else []
        return len(objects) < 2 or any(self._tells(name, objects) for name in names)

    def _tells(self, name: str, objects: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether a property's value tells several object schemas apart."""
        known: set[str] = set()
        optional = 0
        for one in objects:
            values = _values(self._target(_members(one, "properties").get(name)))
            if values is None or known & values:
                return False
            known |= values
            required = one.get("required")
            optional += not (isinstance(required, list) and name in required)
        return optional < 2

    def _target(self, schema: object) -> Mapping[str, Any]:
        """Return a schema or its reference's target; empty if unknown."""
        for _ in range(_MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                break
            reference = schema.get("$ref")
            if reference is None:
                return schema
            if not (self._local and isinstance(reference, str) and reference.startswith("#/")):
                break
            schema = resolve(self._whole, reference)
        return {}


def _says_something(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Return whether an unsupported keyword has any effect in this schema."""
    value = schema[keyword]
    if keyword in _NEEDS and not _NEEDS[keyword] & set(schema):
        return False
    if keyword in {"not", "uniqueItems"}:
        return value is not False
    if keyword.startswith("dependen"):
        return bool(value != {})
    if keyword == "propertyNames" and value == {"type": "string"}:
        return False
    if keyword in {"propertyNames", "unevaluatedItems", "unevaluatedProperties"}:
        return value is not True and value != {}
    return True


def _mixes(schema: Mapping[str, Any]) -> bool:
    """Return whether several parts of a schema describe an object's properties."""
    every = schema.get("allOf")
    places = len(every) if isinstance(every, list) else 0
    places += sum(keyword in schema for keyword in ("$ref", "anyOf", "oneOf"))
    return places + any(keyword in schema for keyword in _OF_OBJECTS) > 1


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema allows; "integer" counts as "number"."""
    declared = schema.get("type")
    if isinstance(declared, str):
        types = {declared}
    elif isinstance(declared, list):
        types = {one for one in declared if isinstance(one, str)}
    elif _values(schema) is not None:
        types = {"string"}
    else:
        types = set(_ALL_TYPES)
    return {"number" if one == "integer" else one for one in types}


def _values(schema: Mapping[str, Any]) -> set[str] | None:
    """Return the strings of `const` or `enum`; None if other values are allowed."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return None
    return set(values)


def _members(schema: Mapping[str, Any], keyword: str) -> Mapping[str, Any]:
    members = schema.get(keyword)
    return members if isinstance(members, Mapping) else {}
