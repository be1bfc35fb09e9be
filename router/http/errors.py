"""Failures as HTTP statuses with the error bodies of OpenAI's, Anthropic's or Ollama's API."""

import math
import re
from collections.abc import Mapping
from typing import Any

import grpc
from pydantic import ValidationError
from starlette.responses import JSONResponse
from starlette.types import Scope

from octavo.client import InvalidArgumentError
from octavo.common import rpc
from octavo.common.rpc import RpcError

INVALID = "invalid_request_error"
UNSUPPORTED = "unsupported_parameter"
WRONG_TYPE = "wrong_type"
UNAVAILABLE_SECONDS = 1.0
"""Default delay before a retry after UNAVAILABLE, in seconds."""

_STATUSES: dict[grpc.StatusCode, tuple[int, str, str | None]] = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, INVALID, None),
    grpc.StatusCode.OUT_OF_RANGE: (400, INVALID, None),
    grpc.StatusCode.FAILED_PRECONDITION: (400, INVALID, None),
    grpc.StatusCode.UNIMPLEMENTED: (400, INVALID, UNSUPPORTED),
    grpc.StatusCode.UNAUTHENTICATED: (401, INVALID, "invalid_api_key"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "permission_error", None),
    grpc.StatusCode.NOT_FOUND: (404, INVALID, "model_not_found"),
    grpc.StatusCode.ALREADY_EXISTS: (409, INVALID, None),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.CANCELLED: (499, INVALID, "cancelled"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "server_error", "deadline_exceeded"),
}

MESSAGES_PATHS = ("/v1/messages", "/v1/messages/count_tokens")
"""Ends of the paths of Anthropic's API."""
OLLAMA_PATH = "/api/"
"""Beginning of the paths of Ollama's API, behind the root path."""
MESSAGES_ID = "Request-Id"
"""Anthropic's name of the header X-Request-Id."""
_MESSAGES_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors, by status."""

_REASONS = {rpc.CONTEXT_LENGTH_EXCEEDED: "context_length_exceeded"}
"""OpenAI's codes of errors whose reason says more than their status."""

_PARAMS = {
    "beam": "beam_width",
    "beam.width": "beam_width",
    "chat.add_generation_prompt": "add_generation_prompt",
    "chat.chat_template_kwargs": "chat_template_kwargs",
    "chat.continue_final_message": "continue_final_message",
    "chat.messages": "messages",
    "chat.tool_choice": "tool_choice",
    "chat.tools": "tools",
    "stop.strings": "stop",
    "stop.token_ids": "stop_token_ids",
    "text": "prompt",
    "token_ids": "tokens",
    "tokens.token_ids": "prompt",
}
"""HTTP names of fields of GenerateRequest that differ from the field path's last part."""

_PATH = re.compile(
    r"\b(?:beam|chat|constraint|output|sampling|stop|tokens)\.[a-z_]+"
    r"(?:(?:\[\d+\])?\.[a-z_]+(?:\[\d+\])?)*"
)
_NESTED = ("input", "messages", "tools")
"""Arguments whose errors include the path inside them."""
_PARTS = (
    (re.compile(r"^(tools\[\d+\]|messages\[\d+\]\.tool_calls\[\d+\])\.(?!id\b)"), r"\1.function."),
    (re.compile(r"^(messages\[\d+\])\.parts\b"), r"\1.content"),
    (re.compile(r"^(messages\[\d+\]\.content\[\d+\])\.image\b"), r"\1.image_url"),
    (re.compile(r"^(messages\[\d+\])\.reasoning\b"), r"\1.reasoning_content"),
)
"""Paths inside messages and tools, and their HTTP form."""


class ApiError(Exception):
    """An error of the HTTP API.

    Attributes:
        status: The HTTP status.
        headers: Headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self._error = {"message": message, "type": kind, "param": param, "code": code}

    @property
    def body(self) -> dict[str, Any]:
        """The response's JSON, which describes the error."""
        return {"error": self._error}

    @property
    def ollama_body(self) -> dict[str, str]:
        """The response's JSON in the form of Ollama's API."""
        return {"error": str(self)}

    def messages_body(self, request_id: str) -> dict[str, Any]:
        """Return the JSON of the response in the form of Anthropic's API."""
        other = "invalid_request_error" if self.status < 500 else "api_error"
        described = {"type": _MESSAGES_KINDS.get(self.status, other), "message": str(self)}
        return {"type": "error", "error": described, "request_id": request_id}

    def response(self, scope: Scope) -> JSONResponse:
        """Return the HTTP response to a request, in the form of the API that it is for."""
        if speaks_anthropic(scope):
            request_id = scope["state"]["request_id"]
            body = self.messages_body(request_id)
            return JSONResponse(body, self.status, {**self.headers, MESSAGES_ID: request_id})
        body = self.ollama_body if OLLAMA_PATH in scope["path"] else self.body
        return JSONResponse(body, self.status, self.headers)


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether a request is for Anthropic's API, by its path or its `anthropic-version`."""
    return scope["path"].endswith(MESSAGES_PATHS) or any(
        name == b"anthropic-version" for name, _ in scope["headers"]
    )


def from_rpc(error: RpcError, params: Mapping[str, str] | None = None) -> ApiError:
    """Translate a gRPC error for HTTP clients.

    Args:
        error: The error of a call.
        params: HTTP names that this request used for fields, where they differ from `_PARAMS`.
    """
    status, kind, code = _STATUSES.get(error.code, (500, "server_error", None))
    code = _REASONS.get(error.reason or "", code)
    field = error.field
    param = None if field is None else named(field, params)
    message = error.message
    if field is not None and param is not None and message.startswith(f"{field} "):
        message = param + message.removeprefix(field)
    message = _PATH.sub(lambda path: named(path[0], params), message)
    headers = {}
    retry_after = error.retry_after
    if retry_after is None and status == 503:
        retry_after = UNAVAILABLE_SECONDS
    if retry_after is not None:
        headers["Retry-After"] = str(math.ceil(retry_after))
        headers["Retry-After-Ms"] = str(math.ceil(retry_after * 1000))
    if status == 504:
        headers["X-Should-Retry"] = "false"  # the client's deadline has passed
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return ApiError(
        status,
        message,
        kind=kind,
        param=param,
        code=code,
        headers=headers,
    )


def from_client(error: InvalidArgumentError, params: Mapping[str, str] | None = None) -> ApiError:
    """Translate an error about a value that does not fit its protobuf field."""
    return from_rpc(rpc.invalid(error.violations[0].field, error.message), params)


def from_validation(error: ValidationError) -> ApiError:
    """Translate a body's validation error, naming the first wrong argument."""
    details = error.errors(include_url=False, include_context=False)[0]
    if details["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {details['msg'].partition(': ')[2]}")
    param = _location(details["loc"])
    if not param:
        return ApiError(400, "the body must be a JSON object")
    if details["type"] == "extra_forbidden":
        return ApiError(400, f"unknown argument {param}", param=param, code="unknown_parameter")
    if details["type"] == UNSUPPORTED:
        return ApiError(400, f"{param} {details['msg']}", param=param, code=UNSUPPORTED)
    if details["type"] == WRONG_TYPE:
        return ApiError(400, f"{param} {details['msg']}", param=param)
    what = details["msg"]
    return ApiError(400, f"{param}: {what[:1].lower()}{what[1:]}", param=param)


def named(path: str, params: Mapping[str, str] | None = None) -> str:
    """Return the HTTP name of `path`, a field of GenerateRequest.

    >>> named("sampling.logit_bias[5]")
    'logit_bias'

    Args:
        path: The field.
        params: See `from_rpc`.
    """
    names = _PARAMS | dict(params or {})
    for known, name in sorted(names.items(), key=_length, reverse=True):
        if path == known or path.startswith((f"{known}[", f"{known}.")):
            return _within(name + path.removeprefix(known)) if name in _NESTED else name
    return path.rpartition(".")[2].partition("[")[0]


def _length(entry: tuple[str, str]) -> int:
    return len(entry[0])


def _within(path: str) -> str:
    """Return the HTTP form of a path inside messages or tools.

    >>> _within("messages[0].tool_calls[1].arguments")
    'messages[0].tool_calls[1].function.arguments'
    """
    for pattern, shown in _PARTS:
        path = pattern.sub(shown, path)
    return path


def _location(parts: tuple[int | str, ...]) -> str:
    """Format a location as a path such as messages[0].content."""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("["):  # else pydantic's own: a key, or an arm of a union
            path += f".{part}" if path else part
    return path
