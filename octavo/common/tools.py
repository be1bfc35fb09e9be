"""Tools that a model may call, and JSON Schemas from whatever a client has of one."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import TypeAdapter

Schema: TypeAlias = str | Mapping[str, Any] | type[Any]
"""A JSON Schema as JSON or as a mapping, or a type that pydantic makes one of, such as a model."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call. The client runs it.

    Attributes:
        name: 1 to 128 letters, digits, underscores, hyphens, dots, slashes and colons.
        description: Description for the model.
        parameters: The JSON Schema of its arguments, an object.
        strict: Whether the arguments must keep to it even where the model chooses to call.
    """

    name: str
    description: str = ""
    parameters: Schema = field(default_factory=dict, hash=False)
    strict: bool = False


def schema_text(schema: Schema) -> str:
    """Return a JSON Schema as JSON.

    Raises:
        TypeError: The mapping holds what JSON does not have.
        ValueError: It holds NaN or an infinity.
        pydantic.errors.PydanticUserError: There is no schema of the type.
    """
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        schema = TypeAdapter(schema).json_schema()
    return json.dumps(schema, ensure_ascii=False, allow_nan=False)
