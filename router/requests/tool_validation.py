"""Validation of a chat's tools and calls, and of options that exclude them."""

import re

from octavo.common import limits, rpc
from octavo.router.requests.offered_tools import must_call
from octavo.router.requests.output_plan import read_schema
from octavo.v1 import generation_pb2

NAME = re.compile(rf"[A-Za-z0-9_./:-]{{1,{limits.MAX_TOOL_NAME}}}")
"""Tool names as in the Model Context Protocol, where slashes and colons delimit the server."""


def check_tools(chat: generation_pb2.ChatPrompt) -> None:
    """Check a chat's tools, and that the forced tool exists.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT, with the field's name.
    """
    limits.check_count("chat.tools", len(chat.tools), limits.MAX_TOOLS)
    names: set[str] = set()
    for i, tool in enumerate(chat.tools):
        field = f"chat.tools[{i}]"
        _check_name(f"{field}.name", tool.name)
        if tool.name in names:
            raise rpc.invalid(f"{field}.name", f"{field}.name repeats {tool.name!r}")
        names.add(tool.name)
        if tool.parameters:
            _check_parameters(f"{field}.parameters", tool.parameters)
    _check_choice(chat, names)


def check_call(field: str, call: generation_pb2.ToolCall) -> None:
    """Check a tool call in an assistant's message; its arguments may be any text, as in outputs.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT, with the field's name.
    """
    if not call.name:
        raise rpc.invalid(f"{field}.name", f"{field}.name must not be empty")


def check_excluded(request: generation_pb2.GenerateRequest) -> None:
    """Check that a request does not both force calls and set a constraint.

    Raises:
        rpc.RpcError: INVALID_ARGUMENT.
    """
    if request.HasField("constraint") and must_call(request.chat):
        raise rpc.invalid(
            "constraint",
            "constraint excludes tools that must be called; set chat.tool_choice to auto or none",
        )


def _check_name(field: str, name: str) -> None:
    if not NAME.fullmatch(name):
        raise rpc.invalid(
            field,
            f"{field} must be 1 to {limits.MAX_TOOL_NAME} letters, digits and any of _ - . / :; "
            f"got {name[:64]!r}",
        )


def _check_parameters(field: str, text: str) -> None:
    schema = read_schema(field, text)
    if schema and schema.get("type", "object") != "object":
        raise rpc.invalid(
            field, f"{field} must be a schema of an object; its type is {schema['type']!r}"
        )


def _check_choice(chat: generation_pb2.ChatPrompt, names: set[str]) -> None:
    field = "chat.tool_choice"
    if chat.tool_choice.name and chat.tool_choice.name not in names:
        raise rpc.invalid(
            f"{field}.name", f"{field}.name must be that of a tool; got {chat.tool_choice.name!r}"
        )
    if must_call(chat) and not chat.tools:
        raise rpc.invalid(field, f"{field} needs at least one tool in chat.tools")
