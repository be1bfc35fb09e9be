"""Splits the JSON Schema of a tool's arguments into a schema per argument."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from octavo.router.requests.parsers.values import json_types

Schema: TypeAlias = Mapping[str, Any]

ANNOTATIONS = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "readOnly", "title"}
    | {"writeOnly", "contentEncoding", "contentMediaType", "contentSchema"}
)
"""Keywords without effect on validity."""
DEFINITIONS = ("$defs", "definitions")
_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$schema", "$id"}
_OF_STRINGS = {"minLength", "maxLength", "pattern", "format"}
_MAX_DEPTH = 64
"""Maximum nesting depth of parts and references."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a tool.

    Attributes:
        name: Name of the argument.
        schema: Schema of the value.
        required: Whether calls must contain the argument.
    """

    name: str
    schema: Schema
    required: bool


@dataclass(frozen=True, slots=True)
class ArgumentSchemas:
    """The arguments of a tool.

    Attributes:
        named: Arguments that the schema names.
        others: Schema of other arguments' values; None: calls need no others.
    """

    named: tuple[Argument, ...]
    others: Schema | None


@dataclass(frozen=True, slots=True)
class Values:
    """The possible values of an argument.

    Attributes:
        strings: Schemas of strings; a value matches any of them.
        words: Strings that are allowed literally.
        others: Schemas of other types.
        free: Whether any value is allowed.
    """

    strings: tuple[Schema, ...] = ()
    words: tuple[str, ...] = ()
    others: tuple[Schema, ...] = ()
    free: bool = False


def arguments_of(schema: Schema) -> ArgumentSchemas | None:
    """Return the arguments of a tool's schema.

    Return None if the schema has other rules than one per argument.
    """
    if not _only_names_arguments(schema):
        return None
    properties, required = schema.get("properties", {}), schema.get("required", [])
    more = schema.get("additionalProperties", True)
    named = {**dict.fromkeys(required, more), **properties}
    if any(named[name] is False for name in required):
        return None  # nothing is valid: compiling reports it
    arguments = tuple(
        Argument(name, {} if one is True else one, name in required)
        for name, one in {**properties, **named}.items()
        if one is not False
    )
    if arguments or more is False:
        return ArgumentSchemas(arguments, None)
    return ArgumentSchemas(arguments, {} if more is True else more)


def _only_names_arguments(schema: Schema) -> bool:
    """Return whether a schema describes an object with only the keywords of `arguments_of`."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    return (
        set(schema) <= _OF_OBJECTS | ANNOTATIONS | set(DEFINITIONS)
        and schema.get("type", "object") == "object"
        and isinstance(properties, Mapping)
        and isinstance(required, list)
        and all(isinstance(name, str) for name in required)
        and all(
            isinstance(one, Mapping | bool)
            for one in (*properties.values(), schema.get("additionalProperties", True))
        )
    )


def argument_schema(schema: Schema, name: str) -> Schema:
    """Return the schema of one argument; empty if the tool's schema lacks it."""
    for key, one in (("properties", schema.get("properties")), ("additionalProperties", schema)):
        if isinstance(one, Mapping):
            argument = one.get(name if key == "properties" else key)
            if isinstance(argument, Mapping):
                return argument
    return {}


def types_of(schema: Schema, root: Schema) -> frozenset[str]:
    """Return the JSON types that a value may have; empty if any or unknown.

    Args:
        schema: The schema of the value.
        root: The schema with the definitions.
    """
    return _Reader(root).types(schema)


def refers_to_whole(schema: Any) -> bool:  # noqa: ANN401 - any JSON
    """Return whether a part of a schema has references outside the definitions."""
    if isinstance(schema, list):
        return any(map(refers_to_whole, schema))
    if not isinstance(schema, Mapping):
        return False
    reference = schema.get("$ref")
    if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
        return True
    return any(map(refers_to_whole, schema.values()))


def with_definitions(schema: Schema, root: Schema) -> Schema:
    """Return a part of a schema, with the whole schema's definitions."""
    return {**schema, **{key: root[key] for key in DEFINITIONS if key in root}}


def values_of(schema: Schema, root: Schema) -> Values | None:
    """Return an argument's possible values; None if strings look like other types.

    Args:
        schema: The schema of the value.
        root: The schema with the definitions.
    """
    return _Reader(root).values(schema)


class _Reader:
    """Evaluate the values that a schema allows; shared parts are evaluated once.

    Args:
        root: The schema with the definitions.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        # By object id; a part that refers to itself is unknown while it is evaluated.
        self._types: dict[int, frozenset[str]] = {}
        self._values: dict[int, Values | None] = {}
        self._depth = 0

    def types(self, schema: Any) -> frozenset[str]:  # noqa: ANN401 - any JSON
        """Return the JSON types that a value may have; empty if any or unknown."""
        if not isinstance(schema, Mapping):
            return frozenset()
        if id(schema) not in self._types:
            self._types[id(schema)] = frozenset()
            with self._deeper() as read:
                if read:
                    self._types[id(schema)] = self._read_types(schema)
        return self._types[id(schema)]

    @contextmanager
    def _deeper(self) -> Iterator[bool]:
        """Enter a part; return whether to evaluate it, as it may be too deep."""
        self._depth += 1
        yield self._depth <= _MAX_DEPTH
        self._depth -= 1

    def _read_types(self, schema: Schema) -> frozenset[str]:
        declared = schema.get("type")
        if isinstance(declared, str):
            return frozenset({declared})
        if isinstance(declared, list):
            return frozenset(one for one in declared if isinstance(one, str))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return frozenset().union(*map(json_types, values))
        for name in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(name), list):
                each = list(map(self.types, branches))
                return frozenset().union(*each) if all(each) else frozenset()
        return next(filter(None, map(self.types, _parts(schema, self._root))), frozenset())

    def values(self, schema: Schema) -> Values | None:
        """Return an argument's possible values; None if strings look like other types."""
        if id(schema) not in self._values:
            self._values[id(schema)] = None
            with self._deeper() as read:
                if read:
                    self._values[id(schema)] = self._read_values(schema)
        return self._values[id(schema)]

    def _read_values(self, schema: Schema) -> Values | None:
        types = self.types(schema)
        schema = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
        if types and "string" not in types:
            return Values(others=(schema,))
        if "enum" in schema or "const" in schema:
            return _listed(schema)
        if "type" in schema:
            return _of_types(schema, schema["type"])
        return Values(free=True) if not schema else self._combined(schema)

    def _combined(self, schema: Schema) -> Values | None:
        """Return the values of a combined schema."""
        if len(schema) > 1:
            return None
        if "oneOf" in schema and not self._disjoint(schema["oneOf"]):
            return None
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list):
            return _joined(map(self.values, branches))
        parts = list(_parts(schema, self._root))
        return self.values(parts[0]) if len(parts) == 1 else None

    def _disjoint(self, branches: Any) -> bool:  # noqa: ANN401 - any JSON
        """Return whether branches are disjoint by type."""
        if not isinstance(branches, list):
            return False
        each = list(map(self.types, branches))
        each = [one | {"number"} if "integer" in one else one for one in each]
        return all(each) and len(frozenset().union(*each)) == sum(map(len, each))


def _listed(schema: Schema) -> Values | None:
    """Return the values of an enumeration."""
    values = schema.get("enum", [schema.get("const")])
    if len(set(schema) - {"type"}) > 1 or not isinstance(values, list):
        return None
    if "type" in schema:
        declared = schema["type"]
        types = {declared} if isinstance(declared, str) else set(declared)
        values = [value for value in values if json_types(value) & types]
    words = tuple(value for value in values if isinstance(value, str))
    others = [value for value in values if not isinstance(value, str)]
    return Values(words=words, others=({"enum": others},) if others else ())


def _of_types(schema: Schema, types: Any) -> Values | None:  # noqa: ANN401 - any JSON
    """Return the values of one or several types that include strings."""
    if types == "string":
        return Values(strings=(schema,)) if set(schema) <= _OF_STRINGS | {"type"} else None
    strings = {key: schema[key] for key in _OF_STRINGS if key in schema}
    others = [one for one in types if one != "string"]
    rest = {key: one for key, one in schema.items() if key not in _OF_STRINGS}
    return Values(
        strings=({"type": "string", **strings},),
        others=({**rest, "type": others},) if others else (),
    )


def _joined(each: Iterator[Values | None]) -> Values | None:
    strings: tuple[Schema, ...] = ()
    words: tuple[str, ...] = ()
    others: tuple[Schema, ...] = ()
    free = False
    for one in each:
        if one is None:
            return None
        strings, words = strings + one.strings, words + one.words
        others, free = others + one.others, free or one.free
    return Values(free=True) if free else Values(_once(strings), words, _once(others))


def _once(schemas: tuple[Schema, ...]) -> tuple[Schema, ...]:
    """Remove schemas that occur earlier: several branches may share a part."""
    return tuple({id(one): one for one in schemas}.values())


def _parts(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Yield the targets of a schema's references."""
    if isinstance(every := schema.get("allOf"), list):
        yield from (one for one in every if isinstance(one, Mapping))
    reference = schema.get("$ref")
    if isinstance(reference, str):
        kind, _, name = reference.removeprefix("#/").partition("/")
        known = root.get(kind) if kind in DEFINITIONS else None
        part = known.get(name) if isinstance(known, Mapping) else None
        if isinstance(part, Mapping):
            yield part
