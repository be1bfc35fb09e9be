"""Output constraints, by OpenAI's `response_format` or vLLM's argument names."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeAlias

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from octavo.client import GenerateOptions
from octavo.router.http.bodies import OpenBody, Strict
from octavo.router.http.errors import WRONG_TYPE, ApiError
from octavo.router.http.no_ops import Never, only


def _schema(value: object) -> object:
    """Return a JSON Schema as a string; vLLM accepts an object or a JSON string."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    raise PydanticCustomError(WRONG_TYPE, "must be a JSON Schema: an object, or JSON in a string")


SchemaText: TypeAlias = Annotated[str | None, BeforeValidator(_schema)]


class JsonSchema(OpenBody):
    """A named JSON Schema; without `strict`, parts that cannot be enforced are ignored."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(OpenBody):
    """OpenAI's `response_format`."""

    type: Annotated[str, only("text", "json_object", "json_schema")]
    json_schema: JsonSchema | None = None
    # Members of other types and other servers.
    format: Never = None
    grammar: Never = None
    regex: Never = None
    schema_: Never = Field(None, alias="schema")
    structures: Never = None
    triggers: Never = None
    value: Never = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ApiError(
                400,
                'response_format.json_schema must be given if the type is "json_schema", and only'
                " then",
                param="response_format.json_schema",
            )
        return self


class StructuredOutputs(Strict):
    """vLLM's way."""

    json_: SchemaText = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None
    disable_fallback: Annotated[Any, only(False)] = None
    structural_tag: Never = None
    whitespace_pattern: Never = None


@dataclass(frozen=True, slots=True)
class Form:
    """An output constraint of a request.

    Attributes:
        param: The HTTP argument that sets it.
        option: The matching option of the client's `generate`.
        value: The option's value.
        strict: Whether to reject a schema that cannot be enforced completely.
    """

    param: str
    option: str
    value: object
    strict: bool = False


class FormArguments(OpenBody):
    """The arguments that constrain outputs."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaText = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @model_validator(mode="after")
    def _check_forms(self) -> Self:
        forms = list(self._forms())
        if len(forms) > 1:
            first, second = forms[0].param, forms[1].param
            raise ApiError(400, f"{second} and {first} exclude each other", param=second)
        return self

    def form_options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""
        options: Any = {}
        for form in self._forms():
            options[form.option] = form.value
            if form.option == "json_schema":
                options["lenient_schema"] = not form.strict
        typed: GenerateOptions = options
        return typed

    def form_params(self) -> dict[str, str]:
        """Return the HTTP name of the GenerateRequest field that holds the constraint."""
        form = next(self._forms(), None)
        return {} if form is None else {"constraint": form.param}

    def _forms(self) -> Iterator[Form]:
        """Yield the requested constraints; the caller rejects more than one."""
        if (requested := self.response_format) is not None:
            if requested.type == "json_object":
                yield Form("response_format", "json_object", True)
            elif requested.json_schema is not None:
                param = "response_format.json_schema.schema"
                schema = requested.json_schema
                yield Form(param, "json_schema", schema.schema_, strict=bool(schema.strict))
        if (outputs := self.structured_outputs) is not None:
            for name, option, value in (
                ("json", "json_schema", outputs.json_),
                ("json_object", "json_object", outputs.json_object or None),
                ("regex", "regex", outputs.regex),
                ("choice", "choices", outputs.choice),
                ("grammar", "grammar", outputs.grammar),
            ):
                if value is not None:
                    yield Form(f"structured_outputs.{name}", option, value)
        for name, option in (
            ("guided_json", "json_schema"),
            ("guided_regex", "regex"),
            ("guided_choice", "choices"),
            ("guided_grammar", "grammar"),
        ):
            if (value := getattr(self, name)) is not None:
                yield Form(name, option, value)
