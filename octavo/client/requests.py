"""Turns a client's arguments into requests: one place for sync and asyncio."""

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import grpc
from google.protobuf.message import Message as Protobuf

from octavo.client.errors import FieldViolation, InvalidArgumentError
from octavo.client.types import Message
from octavo.common.sampling_parameters import PARAMETERS, GenerateOptions
from octavo.v1 import generation_pb2 as pb

Prompt = str | Sequence[Message] | Sequence[Mapping[str, str]] | Sequence[int]
"""Plain text, a chat (messages, or mappings with role and content), or token ids."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """Builds a GenerateRequest.

    Raises:
        InvalidArgumentError: a value does not fit its field's type, for example
            a negative `top_k`. Ranges are the server's to check.
        TypeError: an option is unknown or the prompt is none of the three kinds.
    """
    request = pb.GenerateRequest()
    _set_prompt(request, prompt)
    for name, value in options.items():
        if name not in PARAMETERS:
            raise TypeError(f"generate() has no option {name!r}")
        if value is not None:
            _set(request, PARAMETERS[name].path, value)
    return request


def tokenize_request(prompt: Prompt, model: str | None) -> pb.TokenizeRequest:
    """Builds a TokenizeRequest from text or a chat."""
    request = pb.TokenizeRequest(model=model or "")
    _set_prompt(request, prompt)
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str | None, keep_special_tokens: bool
) -> pb.DetokenizeRequest:
    """Builds a DetokenizeRequest."""
    request = pb.DetokenizeRequest(model=model or "", keep_special_tokens=keep_special_tokens)
    _set(request, "token_ids", token_ids)
    return request


def _set_prompt(request: pb.GenerateRequest | pb.TokenizeRequest, prompt: Prompt) -> None:
    """Sets the oneof that the prompt's kind calls for."""
    if isinstance(prompt, str):
        _checked("text", lambda: setattr(request, "text", prompt))
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
        role, content = message.role, message.content
        _checked(
            f"chat.messages[{number}]",
            lambda role=role, content=content: request.chat.messages.add(  # type: ignore[misc]
                role=role, content=content
            ),
        )


def _set(request: Protobuf, path: str, value: object) -> None:
    """Sets the field at `path`, whatever its shape."""
    *parents, name = path.split(".")
    target = request
    for parent in parents:
        target = getattr(target, parent)
    if isinstance(value, Mapping):
        _checked(path, lambda: getattr(target, name).update(value))
    elif isinstance(getattr(target, name), str | int | float):
        _checked(path, lambda: setattr(target, name, value))
    else:
        values = [value] if isinstance(value, str) else value
        _checked(path, lambda: getattr(target, name).extend(values))


def _checked(path: str, assign: Callable[[], object]) -> None:
    """Runs an assignment and says which field it was if protobuf refuses it."""
    try:
        assign()
    except (TypeError, ValueError) as error:
        violation = FieldViolation(path, str(error))
        code = grpc.StatusCode.INVALID_ARGUMENT
        raise InvalidArgumentError(code, f"{path}: {error}", (violation,)) from None
