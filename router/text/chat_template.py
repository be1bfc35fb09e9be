"""The variables that a request gives to its model's chat template."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
from google.protobuf import struct_pb2
from transformers import PreTrainedTokenizerBase

from octavo.common import rpc
from octavo.v1 import generation_pb2

OWN = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Names that the router, or transformers, gives a value: the template itself is one of them."""

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template may fail with, as variables may have any type."""


def own_name(names: Iterable[str]) -> str | None:
    """Return the first of some names that no caller may set, if there is one."""
    return min(OWN.intersection(names), default=None)


def template_variables(
    chat: generation_pb2.ChatPrompt, change: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return a chat's `chat_template_kwargs`.

    Args:
        chat: The chat.
        change: Changes each text in them.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT: a name is not free to be set.
    """
    fields = chat.chat_template_kwargs.fields
    if (taken := own_name(fields)) is not None:
        raise rpc.invalid(
            "chat.chat_template_kwargs",
            f"chat.chat_template_kwargs may not have {taken!r}, which the server sets itself",
        )
    return {name: changed(_plain(value), change) for name, value in fields.items()}


def changed(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - any JSON
    """Return a JSON value with its texts and names changed."""
    match value:
        case str():
            return change(value)
        case list():
            return [changed(one, change) for one in value]
        case dict():
            return {change(name): changed(one, change) for name, one in value.items()}
    return value


def _plain(value: struct_pb2.Value) -> Any:  # noqa: ANN401 - any JSON
    """Return a value as Python has it; whole numbers as int, which Struct does not have."""
    match value.WhichOneof("kind"):
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "list_value":
            return [_plain(one) for one in value.list_value.values]
        case "struct_value":
            return {name: _plain(one) for name, one in value.struct_value.fields.items()}
    return None
