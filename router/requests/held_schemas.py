"""A request's JSON Schemas: those that a grammar enforces, and those checked at the end."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.router.requests.lenient_schema import MAX_PLACES, LenientSchema, exact, lenient
from octavo.router.requests.offered_tools import OfferedTool, closed, must_call, offered_tools
from octavo.v1 import generation_pb2
from octavo.v1.sampling_pb2 import OutputConstraint


@dataclass(slots=True)
class HeldSchemas:
    """The schemas of a request's outputs.

    A grammar enforces `content` and `tools`. What it cannot enforce of the client's schemas is
    checked at an output's end.

    Attributes:
        content: A schema of content that replaces the constraint's; None: no constraint, or
            unchanged.
        tools: The tools that outputs may call; the grammar enforces the arguments of `strict` ones.
        checked_content: The JSON Schema to check content against; None: enforced by a grammar, or
            absent.
        checked_arguments: The schemas to check calls' arguments against, by tool name.
        fields: The schemas to check against, by request field.
        unenforced: Unenforced parts, such as `constraint.json_schema#/properties/tags/uniqueItems`.
    """

    content: Mapping[str, Any] | None = None
    tools: list[OfferedTool] = field(default_factory=list)
    checked_content: str | None = None
    checked_arguments: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    unenforced: list[str] = field(default_factory=list)

    @property
    def checks(self) -> "HeldSchemas | None":
        """The schemas if something of them is checked at an output's end."""
        return self if self.unenforced else None

    def _check(self, name: str, schema: str, reduced: LenientSchema) -> None:
        """Record the parts that were removed from the schema in a field."""
        self.fields[name] = schema
        places = [f"{name}{place}" for place in reduced.unenforced]
        self.unenforced = (self.unenforced + places)[:MAX_PLACES]

    def add_tool(self, tool: OfferedTool, field_name: str, parameters: str) -> None:
        """Add a tool that outputs must call: then its arguments always follow the schema.

        Args:
            tool: The tool.
            field_name: The request's field of its parameters.
            parameters: This field's JSON Schema.
        """
        whole = closed(tool.schema)
        reduced = LenientSchema(exact(whole)) if tool.strict else lenient(whole)
        if reduced.unenforced:
            self.checked_arguments[tool.name] = parameters
            self._check(field_name, parameters, reduced)
        self.tools.append(OfferedTool(tool.name, reduced.schema, strict=True))

    def set_content(self, constraint: OutputConstraint) -> None:
        """Set the schema of content, unless the constraint's own is used."""
        text = constraint.json_schema
        try:
            schema = json.loads(text)
        except (ValueError, RecursionError):
            return
        if not isinstance(schema, dict):
            return
        reduced = lenient(schema)
        if reduced.unenforced and not constraint.lenient:
            return
        if reduced.unenforced:
            self.checked_content = text
            self._check("constraint.json_schema", text, reduced)
        self.content = None if reduced.schema == schema else reduced.schema


def held_schemas(message: generation_pb2.GenerateRequest) -> HeldSchemas:
    """Return a valid request's schemas, reduced to what a grammar can enforce."""
    schemas = HeldSchemas()
    if message.constraint.WhichOneof("kind") == "json_schema":
        schemas.set_content(message.constraint)
    chat = message.chat
    named, forced = chat.tool_choice.name, must_call(chat)
    for i, tool in enumerate(offered_tools(chat)):
        if not forced:
            schema = exact(tool.schema) if tool.strict else tool.schema
            schemas.tools.append(OfferedTool(tool.name, schema, strict=tool.strict))
        elif named in {"", tool.name}:
            schemas.add_tool(tool, f"chat.tools[{i}].parameters", chat.tools[i].parameters)
    return schemas
