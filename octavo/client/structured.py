"""Outputs as instances of Python types, for sync and asyncio."""

from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from octavo.client.checks import invalid
from octavo.client.errors import OutputError
from octavo.client.types import Completion
from octavo.common.sampling_parameters import GenerateOptions

T = TypeVar("T")


def constrained(options: GenerateOptions, schema: type[T] | None) -> GenerateOptions:
    """Return options that constrain the output to the JSON Schema of a type, if given.

    Raises:
        InvalidArgumentError: There are several outputs, or another schema.
    """
    if schema is None:
        return options
    if (options.get("n") or 1) > 1:
        raise invalid("sampling.n", "complete() with schema returns one output: n must be 1")
    if options.get("json_schema") is not None:
        raise invalid("constraint.json_schema", "schema and json_schema exclude each other")
    return {**options, "json_schema": schema}


def instance(completion: Completion, schema: type[T] | None) -> Completion | T:
    """Return the first output as an instance of a type; without a type, the whole result.

    Raises:
        OutputError: The output was truncated, or a validator of the type rejects it.
    """
    if schema is None:
        return completion
    output = completion.outputs[0]
    try:
        return TypeAdapter(schema).validate_json(output.text)
    except ValidationError as error:
        tokens = output.usage.output_tokens
        message = f"an output of {tokens} tokens, which ended by {output.reason}, does not fit"
        raise OutputError(f"{message}: {error}", completion) from error
