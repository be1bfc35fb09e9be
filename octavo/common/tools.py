"""Tools for models, and JSON Schemas from clients' types."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import TypeAdapter

Schema: TypeAlias = str | Mapping[str, Any] | type[Any]
"""A JSON Schema as JSON or a mapping, or a type with a JSON Schema in pydantic, such as a model."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call, and the client runs.

    Attributes:
        name: 1 to 128 letters, digits, underscores, hyphens, dots, slashes and colons.
        description: Description for the model.
        parameters: JSON Schema of the arguments, an object.
        strict: Whether arguments must match the schema even if the model may choose not to call.
    """

    name: str
    description: str = ""
    parameters: Schema = field(default_factory=dict, hash=False)
    strict: bool = False


def schema_text(schema: Schema) -> str:
    """Return a JSON Schema as JSON.

    Raises:
        TypeError: The mapping contains values that JSON lacks.
        ValueError: The schema contains NaN or an infinity.
        pydantic.errors.PydanticUserError: The type has no schema.
    """
    if isinstance(schema, str):
        return schema
    if not isinstance(schema, Mapping):
        schema = TypeAdapter(schema).json_schema()
    return json.dumps(schema, ensure_ascii=False, allow_nan=False)
