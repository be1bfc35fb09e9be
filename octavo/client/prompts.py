"""Conversion of prompts and tools to protobuf messages."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, cast

from octavo.client.checks import checked
from octavo.client.types import Image, Message, ToolCall
from octavo.common.tools import Tool, schema_text
from octavo.v1 import generation_pb2 as pb

Prompt: TypeAlias = str | Sequence[Message] | Sequence[Mapping[str, Any]] | Sequence[int]
"""Plain text, a chat (messages, or mappings in OpenAI's form), or token ids."""

PromptRequest: TypeAlias = pb.GenerateRequest | pb.TokenizeRequest

MODES = {
    "auto": pb.TOOL_CHOICE_MODE_AUTO,
    "none": pb.TOOL_CHOICE_MODE_NONE,
    "required": pb.TOOL_CHOICE_MODE_REQUIRED,
}
"""Tool choice rules by name."""


def set_prompt(request: PromptRequest, prompt: Prompt) -> None:
    """Set the oneof field for the prompt's type.

    Raises:
        InvalidArgumentError: A value does not fit its field's type.
        TypeError: The prompt is not text, a chat or token ids.
    """
    if isinstance(prompt, str):
        with checked("text"):
            request.text = prompt
    elif all(isinstance(part, int) for part in prompt):
        if isinstance(request, pb.TokenizeRequest):
            raise TypeError("tokenize() takes text or messages, not token ids")
        request.tokens.SetInParent()
        with checked("tokens.token_ids"):
            request.tokens.token_ids.extend(cast("Sequence[int]", prompt))
    else:
        for number, message in enumerate(cast("Sequence[Message | Mapping[str, Any]]", prompt)):
            if not isinstance(message, Message):
                message = _message(number, message)  # noqa: PLW2901
            with checked(f"chat.messages[{number}]"):
                _add(request.chat, message)


def set_tools(chat: pb.ChatPrompt, tools: Sequence[Tool | Mapping[str, Any]]) -> None:
    """Add tools, each a `Tool` or a mapping in OpenAI's form.

    Raises:
        InvalidArgumentError: A value does not fit its field's type.
        TypeError: An item is neither.
    """
    for number, tool in enumerate(tools):
        if not isinstance(tool, Tool):
            tool = _tool(number, tool)  # noqa: PLW2901
        with checked(f"chat.tools[{number}]"):
            chat.tools.add(
                name=tool.name,
                description=tool.description,
                parameters=schema_text(tool.parameters) if tool.parameters else "",
                strict=tool.strict,
            )


def set_tool_choice(chat: pb.ChatPrompt, choice: str | Tool) -> None:
    """Set the tool choice: a rule, or else a tool's name."""
    with checked("chat.tool_choice"):
        if isinstance(choice, Tool):
            chat.tool_choice.name = choice.name
        elif choice in MODES:
            chat.tool_choice.mode = MODES[choice]
        else:
            chat.tool_choice.name = choice


def _add(chat: pb.ChatPrompt, message: Message) -> None:
    """Add a message to a chat."""
    whole = isinstance(message.content, str)
    chat.messages.add(
        role=message.role,
        content=message.content if whole else "",
        parts=[] if whole else [_content_part(part) for part in message.content],
        tool_calls=[
            pb.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        reasoning=message.reasoning,
        name=message.name,
    )


def _message(number: int, fields: Mapping[str, Any]) -> Message:
    """Return a mapping with a message's members, without null ones."""
    try:
        members = {name: value for name, value in fields.items() if value is not None}
        content = members.pop("content", "")
        return Message(
            content=content if isinstance(content, str) else [_part(part) for part in content],
            tool_calls=[_call(call) for call in members.pop("tool_calls", ())],
            reasoning=members.pop("reasoning_content", "") or members.pop("reasoning", ""),
            **members,
        )
    except (AttributeError, KeyError, TypeError):
        raise TypeError(
            "a prompt is text, a list of messages with role and content, or a list of "
            f"token ids; item {number} is {fields!r}"
        ) from None


def _part(part: str | Image | Mapping[str, Any]) -> str | Image:
    if isinstance(part, str | Image):
        return part
    if part["type"] == "image_url":
        return Image(**part["image_url"])
    if part["type"] != "text":
        raise TypeError
    text: str = part["text"]
    return text


def _content_part(part: str | Image) -> pb.ContentPart:
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    image = pb.ImagePart(media_type=part.media_type, detail=part.detail)
    if part.url:
        image.url = part.url
    else:
        image.data = part.data
    return pb.ContentPart(image=image)


def _call(call: ToolCall | Mapping[str, Any]) -> ToolCall:
    if isinstance(call, ToolCall):
        return call
    function = call.get("function", call)
    return ToolCall(call["id"], function["name"], function["arguments"])


def _tool(number: int, fields: Mapping[str, Any]) -> Tool:
    try:
        members = _function(fields).items()
        return Tool(**{name: value for name, value in members if value is not None})
    except (AttributeError, TypeError):
        raise TypeError(
            "a tool is a Tool, or a mapping with name, description, parameters and strict; "
            f"item {number} is {fields!r}"
        ) from None


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool's members, which OpenAI's API nests in another object."""
    if tool.get("type", "function") != "function":
        raise TypeError
    function: Mapping[str, Any] = tool.get("function", tool)
    return function
