"""Chat templates and their variables, from the server and the request."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import jinja2
from google.protobuf import struct_pb2
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from octavo.common import rpc
from octavo.common.models.errors import first_line
from octavo.common.settings import SettingsError
from octavo.v1 import generation_pb2

OWN = {"messages", *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters}
"""Variables that the router or transformers sets, such as the template itself."""

TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that a template may raise, as variables may have any type."""


@dataclass(frozen=True, slots=True)
class ServerTemplate:
    """The server's settings of the chat template, for all models.

    Attributes:
        text: Template that replaces the model's own, if any.
        variables: Default variables of the template, which chats may override.
    """

    text: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None, variables: Mapping[str, Any]) -> Self:
        """Return the template of --chat-template and --chat-template-kwargs.

        Raises:
            SettingsError: The file is not a template, or a variable is reserved.
        """
        if (reserved := _own_name(variables)) is not None:
            raise SettingsError(
                f"--chat-template-kwargs may not have {reserved!r}, which the server sets itself"
            )
        return cls(None if path is None else _read(path), variables)


MODELS_OWN = ServerTemplate()
"""Settings that keep each model's own template."""


def _read(path: Path) -> str:
    """Read a template from a file.

    Raises:
        SettingsError: The file is unreadable or not a template.
    """
    try:
        text = path.expanduser().read_text()
        chat_template_utils._compile_jinja_template(text)  # noqa: SLF001 - as in rendering
    except OSError as error:
        raise SettingsError(f"cannot read {path} (--chat-template): {error.strerror}") from None
    except jinja2.TemplateSyntaxError as error:
        raise SettingsError(
            f"{path} (--chat-template) is not a chat template: line {error.lineno}:"
            f" {first_line(error)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"{path} (--chat-template) is not a chat template: {first_line(error)}"
        ) from None
    if not text.strip():
        raise SettingsError(f"{path} (--chat-template) is empty")
    return text


def _own_name(names: Iterable[str]) -> str | None:
    """Return the first reserved name among `names`, if any."""
    return min(OWN.intersection(names), default=None)


def template_variables(
    chat: generation_pb2.ChatPrompt, change: Callable[[str], str] = str
) -> dict[str, Any]:
    """Return a chat's `chat_template_kwargs`.

    Args:
        chat: The chat.
        change: Function applied to each text.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT if a name is reserved.
    """
    fields = chat.chat_template_kwargs.fields
    if (reserved := _own_name(fields)) is not None:
        raise rpc.invalid(
            "chat.chat_template_kwargs",
            f"chat.chat_template_kwargs may not have {reserved!r}, which the server sets itself",
        )
    return {name: changed(_plain(value), change) for name, value in fields.items()}


def changed(value: Any, change: Callable[[str], str]) -> Any:  # noqa: ANN401 - any JSON
    """Apply `change` to all texts and names in a JSON value."""
    match value:
        case str():
            return change(value)
        case list():
            return [changed(one, change) for one in value]
        case dict():
            return {change(name): changed(one, change) for name, one in value.items()}
    return value


def _plain(value: struct_pb2.Value) -> Any:  # noqa: ANN401 - any JSON
    """Convert a Struct value to Python; whole numbers become int, which Struct lacks."""
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
