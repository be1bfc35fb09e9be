"""A request's JSON Schemas: those that a grammar enforces, and those checked at the end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.router.requests.lenient_schema import MAX_PLACES, LenientSchema, exact, lenient
from octavo.router.requests.offered_tools import closed, must_call, offered_tools
from octavo.router.requests.parsers.formats import OfferedTool
from octavo.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class SchemaChecks:
    """Schemas that a grammar cannot enforce completely.

    Attributes:
        content: The JSON Schema of content; None: enforced by a grammar, or absent.
        arguments: The schemas of calls' arguments, by tool name.
        fields: These schemas by request field.
        unenforced: Unenforced parts, such as `constraint.json_schema#/properties/tags/uniqueItems`.
    """

    content: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    unenforced: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class HeldSchemas:
    """The schemas that a grammar enforces on a request's outputs.

    Attributes:
        content: A schema of content that replaces the constraint's; None: no constraint, or
            unchanged.
        tools: The tools that outputs may call; the grammar enforces the arguments of `strict` ones.
        checks: Schemas to check at an output's end, if any.
    """

    content: Mapping[str, Any] | None
    tools: Sequence[OfferedTool]
    checks: SchemaChecks | None


def held_schemas(message: generation_pb2.GenerateRequest) -> HeldSchemas:
    """Return a valid request's schemas, reduced to what a grammar can enforce."""
    checks = _Checks()
    content = None
    if message.constraint.WhichOneof("kind") == "json_schema":
        content = _content(message, checks)
    chat = message.chat
    named, forced = chat.tool_choice.name, must_call(chat)
    tools = []
    for i, tool in enumerate(offered_tools(chat)):
        if not forced:
            schema = exact(tool.schema) if tool.strict else tool.schema
            tools.append(OfferedTool(tool.name, schema, strict=tool.strict))
        elif named in {"", tool.name}:
            # If the tool choice forces a call, its arguments always follow the schema.
            whole = closed(tool.schema)
            reduced = LenientSchema(exact(whole)) if tool.strict else lenient(whole)
            if reduced.unenforced:
                checks.arguments[tool.name] = chat.tools[i].parameters
                checks.add(f"chat.tools[{i}].parameters", chat.tools[i].parameters, reduced)
            tools.append(OfferedTool(tool.name, reduced.schema, strict=True))
    return HeldSchemas(content, tools, checks.result())


@dataclass(slots=True)
class _Checks:
    content: str | None = None
    arguments: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)

    def add(self, name: str, schema: str, reduced: LenientSchema) -> None:
        """Record the parts that were removed from the schema in a field."""
        self.fields[name] = schema
        self.places += (f"{name}{place}" for place in reduced.unenforced)

    def result(self) -> SchemaChecks | None:
        if not self.places:
            return None
        return SchemaChecks(self.content, self.arguments, self.fields, self.places[:MAX_PLACES])


def _content(message: generation_pb2.GenerateRequest, checks: _Checks) -> Mapping[str, Any] | None:
    """Return a schema to replace the constraint's; None: keep the constraint's."""
    text = message.constraint.json_schema
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(schema, dict):
        return None
    reduced = lenient(schema)
    if reduced.unenforced and not message.constraint.lenient:
        return None
    if reduced.unenforced:
        checks.content = text
        checks.add("constraint.json_schema", text, reduced)
    return None if reduced.schema == schema else reduced.schema
