"""The tools that outputs may or must call."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.v1 import generation_pb2
from octavo.v1.generation_pb2 import ToolChoiceMode

NO_ARGUMENTS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_OPEN_ENDED = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_COMBINING = (
    *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "if", "not"),
    *("dependencies", "dependentRequired", "dependentSchemas"),
)


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that an output may call.

    Attributes:
        name: Name of the tool.
        schema: JSON Schema of the arguments, an object.
        strict: Whether the arguments must match the schema.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool = False

    @property
    def allowed(self) -> Mapping[str, Any]:
        """The schema for constrained calls that need not be strict."""
        return self.schema if self.strict else {"type": "object"}


def offered_tools(chat: generation_pb2.ChatPrompt) -> list[OfferedTool]:
    """Return the tools that a valid chat's outputs may call."""
    if _mode(chat) == ToolChoiceMode.TOOL_CHOICE_MODE_NONE:
        return []
    return [OfferedTool(one.name, arguments_schema(one), strict=one.strict) for one in chat.tools]


def arguments_schema(tool: generation_pb2.Tool) -> Mapping[str, Any]:
    """Return the JSON Schema of a valid tool's arguments."""
    schema: dict[str, Any] = json.loads(tool.parameters) if tool.parameters else {}
    return schema or NO_ARGUMENTS


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object's schema that forbids unnamed properties.

    It accepts only what the original accepts. Schemas with other property rules stay unchanged.
    """
    if "properties" not in schema or any(key in schema for key in (*_OPEN_ENDED, *_COMBINING)):
        return schema
    return {**schema, "additionalProperties": False}


def must_call(chat: generation_pb2.ChatPrompt) -> bool:
    """Return whether a chat's outputs must call a tool."""
    return bool(chat.tool_choice.name) or _mode(chat) == ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED


def _mode(chat: generation_pb2.ChatPrompt) -> ToolChoiceMode.ValueType:
    return chat.tool_choice.mode
