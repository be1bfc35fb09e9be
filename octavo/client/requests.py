"""Conversion of a client's arguments to requests, for sync and asyncio."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast, get_type_hints

import grpc
from google.protobuf.message import Message as Protobuf

from octavo.client.errors import FieldViolation, InvalidArgumentError
from octavo.client.types import Message
from octavo.common.sampling_parameters import PARAMETERS, ChatOptions, GenerateOptions
from octavo.v1 import generation_pb2 as pb

Prompt = str | Sequence[Message] | Sequence[Mapping[str, str]] | Sequence[int]
"""Plain text, a chat (messages, or mappings with role and content), or token ids."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Build a GenerateRequest; the server checks the ranges.

    Raises:
        InvalidArgumentError: A value does not fit its field's type, such as a negative `top_k`, or
            several options say what form the outputs must have.
        TypeError: An option is unknown or the prompt is not text, a chat or token ids.
    """
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    for name, value in options.items():
        if name not in PARAMETERS:
            raise TypeError(f"generate() has no option {name!r}")
        _set_option(request, name, value)
    _check_constraint(options)
    return request


def tokenize_request(
    prompt: Prompt, model: str | None, options: ChatOptions | None = None
) -> pb.TokenizeRequest:
    """Build a TokenizeRequest from text or a chat.

    Raises:
        InvalidArgumentError: A value does not fit its field's type, or the prompt is no chat.
        TypeError: An option is unknown or the prompt is not text or a chat.
    """
    request = pb.TokenizeRequest(model=model or "")
    _set_prompt(request, prompt)
    for name, value in (options or {}).items():
        if name not in get_type_hints(ChatOptions):
            raise TypeError(f"tokenize() has no option {name!r}")
        _set_option(request, name, value)
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str | None, keep_special_tokens: bool
) -> pb.DetokenizeRequest:
    """Build a DetokenizeRequest."""
    request = pb.DetokenizeRequest(model=model or "", keep_special_tokens=keep_special_tokens)
    _set(request, "token_ids", token_ids)
    return request


def _set_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    """Set the oneof field for the prompt's type."""
    if isinstance(prompt, str):
        _set(request, "text", prompt)
    elif all(isinstance(part, int) for part in prompt):
        if isinstance(request, pb.TokenizeRequest):
            raise TypeError("tokenize() takes text or messages, not token ids")
        request.tokens.SetInParent()
        _set(request, "tokens.token_ids", prompt)
    else:
        _set_chat(request, cast("Sequence[Message | Mapping[str, str]]", prompt))


def _set_chat(
    request: pb.GenerateRequest | pb.TokenizeRequest,
    messages: Sequence[Message | Mapping[str, str]],
) -> None:
    for number, message in enumerate(messages):
        if not isinstance(message, Message):
            try:
                message = Message(message["role"], message["content"])  # noqa: PLW2901
            except (KeyError, TypeError):
                raise TypeError(
                    "a prompt is text, a list of messages with role and content, or a list of "
                    f"token ids; item {number} is {message!r}"
                ) from None
        with _checked(f"chat.messages[{number}]"):
            request.chat.messages.add(role=message.role, content=message.content)


def _set_option(request: pb.GenerateRequest | pb.TokenizeRequest, name: str, value: object) -> None:
    """Set an option that is not None."""
    if value is None:
        return
    parameter = PARAMETERS[name]
    if parameter.message == "chat" and request.WhichOneof("prompt") != "chat":
        raise _invalid(parameter.path, f"{name} needs a prompt of messages: it lays out a chat")
    _set(request, parameter.path, value)


def _check_constraint(options: GenerateOptions) -> None:
    """Refuse two forms of outputs: only the last would be sent."""
    given = [
        name
        for name, value in options.items()
        if value is not None and PARAMETERS[name].path.startswith("constraint.")
    ]
    if len(given) > 1:
        raise _invalid("constraint", f"set only one of {' and '.join(given)}")


def _set(request: Protobuf, path: str, value: object) -> None:
    """Set the scalar, repeated or map field at `path`."""
    *parents, name = path.split(".")
    target = request
    for parent in parents:
        target = getattr(target, parent)
    with _checked(path):
        if isinstance(value, Mapping) and isinstance(getattr(target, name), str):
            setattr(target, name, json.dumps(value, ensure_ascii=False))
        elif isinstance(value, Mapping):
            getattr(target, name).update(value)
        elif isinstance(getattr(target, name), str | int | float):
            setattr(target, name, value)
        else:
            getattr(target, name).extend([value] if isinstance(value, str) else value)


@contextmanager
def _checked(path: str) -> Iterator[None]:
    """Name the field if protobuf refuses an assignment within the block."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise _invalid(path, f"{path}: {error}") from None


def _invalid(path: str, message: str) -> InvalidArgumentError:
    code = grpc.StatusCode.INVALID_ARGUMENT
    return InvalidArgumentError(code, message, (FieldViolation(path, message),))
