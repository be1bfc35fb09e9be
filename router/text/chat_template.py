"""Chat templates: what the server and a request set of them."""

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


@dataclass(frozen=True, slots=True)
class ServerTemplate:
    """What the server sets of the chat template, whatever the model.

    Attributes:
        text: The template, in place of the model's own; None: the model's.
        variables: Variables of the template, for chats that do not set them.
    """

    text: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | None, variables: Mapping[str, Any]) -> Self:
        """Return the template of --chat-template and --chat-template-kwargs.

        Raises:
            SettingsError: The file is no template, or one of the variables is not free to be set.
        """
        if (taken := _own_name(variables)) is not None:
            raise SettingsError(
                f"--chat-template-kwargs may not have {taken!r}, which the server sets itself"
            )
        return cls(None if path is None else _read(path), variables)


MODELS_OWN = ServerTemplate()
"""Each model's own template, as it is."""


def _read(path: Path) -> str:
    """Return the template in a file.

    Raises:
        SettingsError: There is none.
    """
    try:
        text = path.expanduser().read_text()
        chat_template_utils._compile_jinja_template(text)  # noqa: SLF001 - as it will be rendered
    except OSError as error:
        raise SettingsError(f"cannot read {path} (--chat-template): {error.strerror}") from None
    except jinja2.TemplateSyntaxError as error:
        raise SettingsError(
            f"{path} (--chat-template) is no chat template: line {error.lineno}:"
            f" {first_line(error)}"
        ) from None
    except (ValueError, RecursionError) as error:
        raise SettingsError(
            f"{path} (--chat-template) is no chat template: {first_line(error)}"
        ) from None
    if not text.strip():
        raise SettingsError(f"{path} (--chat-template) is empty")
    return text


def _own_name(names: Iterable[str]) -> str | None:
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
    if (taken := _own_name(fields)) is not None:
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
