"""Converts chats to the input of chat templates, by transformers' conventions."""

import enum
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from octavo.router.text.chat_template import changed
from octavo.router.text.control_tokens import Change
from octavo.router.text.model_text import ModelText
from octavo.v1 import generation_pb2
from octavo.v1.generation_pb2 import ToolChoiceMode

_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Templates' names for an assistant's reasoning."""
_CONTENT_MAY_BE_NONE = re.compile(r"content['\"]?\]?\s+(?:is|==)\s+(?:not\s+)?none", re.IGNORECASE)
_WITH_CONTENT = (
    "{%- set filled = namespace(messages=[]) %}"
    "{%- for message in messages %}"
    "{%- set filled.messages = filled.messages + [dict({'content': none}, **message)] %}"
    "{%- endfor %}{%- set messages = filled.messages %}"
)
"""Restores `content: none` in messages: transformers drops None values before templates run."""
INSTRUCTIONS = """\
You can call functions. They are described by these JSON objects, one a line, with JSON Schemas of \
their arguments:
<tools>
{tools}
</tools>

To call one, answer with its name and arguments as a JSON object between these tags:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""
"""System message that describes tools in Hermes' format, for templates without tools."""


class ArgumentsForm(enum.Enum):
    """The type of calls' arguments in a template's input."""

    OBJECTS = enum.auto()
    """Objects, as most templates expect; arguments that are no JSON object stay text."""
    TEXTS = enum.auto()
    """Texts."""
    ONLY_OBJECTS = enum.auto()
    """Objects; other arguments become the only value of an object."""


def forms(chat: generation_pb2.ChatPrompt) -> Iterator[tuple[ArgumentsForm, bool]]:
    """Yield the forms in which a template may accept a valid chat, the most usual first.

    Each is the type of calls' arguments, and whether to append an assistant's text before its calls
    to its reasoning: gpt-oss's template accepts only one of both.
    """
    calling = [message for message in chat.messages if message.tool_calls]
    arguments = [ArgumentsForm.OBJECTS, *([ArgumentsForm.TEXTS] if calling else [])]
    if any(_object(call) is None for message in calling for call in message.tool_calls):
        arguments.append(ArgumentsForm.ONLY_OBJECTS)
    both = any(message.reasoning and text_of(message) for message in calling)
    joined = (False, True) if both else (False,)
    for of_reasoning, of_arguments in itertools.product(joined, arguments):
        yield of_arguments, of_reasoning


def template_input(
    chat: generation_pb2.ChatPrompt,
    model: ModelText,
    change: Change = str,
    arguments: ArgumentsForm = ArgumentsForm.OBJECTS,
    *,
    joined: bool = False,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the messages and the descriptions of tools that a template gets for a valid chat.

    Args:
        chat: The chat.
        model: The model's template.
        change: Function applied to each of the caller's texts.
        arguments: See `forms`.
        joined: See `forms`.
    """
    shown = chat.tool_choice.mode != ToolChoiceMode.TOOL_CHOICE_MODE_NONE
    tools = [_tool(tool, change) for tool in chat.tools] if shown else []
    names = {call.id: call.name for message in chat.messages for call in message.tool_calls}
    messages = [
        _message(message, names, model, change, arguments, joined=joined)
        for message in chat.messages
    ]
    if not model.has_tools:
        messages, tools = _in_text(messages, tools), []
    if model.shows_images:
        for message in messages:
            if message["content"] and isinstance(message["content"], str):
                message["content"] = [{"type": "text", "text": message["content"]}]
    return messages, tools


def changed_template(messages: list[dict[str, Any]], model: ModelText) -> str | None:
    """Return the template for messages without content; None: the model's own renders them."""
    empty = any(message["content"] is None for message in messages)
    return _WITH_CONTENT + model.template if empty else None


def text_of(message: generation_pb2.ChatMessage) -> str:
    """Return a message's text, with its parts on separate lines."""
    if not message.parts:
        return message.content
    return "\n".join(part.text for part in message.parts if not part.HasField("image"))


def _parts(message: generation_pb2.ChatMessage, change: Change) -> list[dict[str, Any]]:
    """Return the parts of a message with images as templates take them; texts are joined."""
    parts: list[dict[str, Any]] = []
    for part in message.parts:
        if part.HasField("image"):
            parts.append({"type": "image"})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += f"\n{part.text}"
        else:
            parts.append({"type": "text", "text": part.text})
    return [part | {"text": change(part["text"])} if "text" in part else part for part in parts]


def _tool(tool: generation_pb2.Tool, change: Change) -> dict[str, Any]:
    parameters = json.loads(tool.parameters) if tool.parameters else {}
    function = {
        "name": change(tool.name),
        "description": change(tool.description),
        "parameters": changed(parameters, change) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _message(
    message: generation_pb2.ChatMessage,
    names: Mapping[str, str],
    model: ModelText,
    change: Change,
    arguments: ArgumentsForm,
    *,
    joined: bool,
) -> dict[str, Any]:
    role, text, reasoning = message.role, text_of(message), message.reasoning
    if joined and message.tool_calls and reasoning and text:
        text, reasoning = "", f"{reasoning}\n\n{text}"
    if role == "developer" and "developer" not in model.template:
        role = "system"
    laid_out: dict[str, Any] = {"role": role, "content": change(text)}
    if any(part.HasField("image") for part in message.parts):
        laid_out["content"] = _parts(message, change)
    if message.tool_calls:
        laid_out["tool_calls"] = [_call(call, change, arguments) for call in message.tool_calls]
        if not laid_out["content"] and _CONTENT_MAY_BE_NONE.search(model.template):
            laid_out["content"] = None  # some templates check this key to detect calls
    if message.tool_call_id:
        laid_out["tool_call_id"] = change(message.tool_call_id)
    if name := message.name or (role == "tool" and names.get(message.tool_call_id)):
        laid_out["name"] = change(name)
    if reasoning:
        reasoning = change(reasoning)
        laid_out |= {key: reasoning for key in _REASONING if key in model.template}
    return laid_out


def _call(
    call: generation_pb2.ToolCall, change: Change, arguments: ArgumentsForm
) -> dict[str, Any]:
    text = call.arguments or "{}"
    call_arguments: object = text if arguments is ArgumentsForm.TEXTS else _object(call)
    if call_arguments is None:
        call_arguments = text if arguments is ArgumentsForm.OBJECTS else {"arguments": text}
    function = {"name": change(call.name), "arguments": changed(call_arguments, change)}
    return {"id": change(call.id), "type": "function", "function": function}


def _object(call: generation_pb2.ToolCall) -> dict[str, Any] | None:
    """Return a call's arguments; None if they are not a JSON object, as in a truncated output."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def _in_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with calls, results and tools as text."""
    written = [_as_text(message) for message in messages]
    if not tools:
        return written
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instructions = INSTRUCTIONS.format(tools=lines)
    if written[0]["role"] == "system":
        first, *others = written
        instructions = f"{first['content']}\n\n{instructions}" if first["content"] else instructions
        return [{**first, "content": instructions}, *others]
    return [{"role": "system", "content": instructions}, *written]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    if calls := message.get("tool_calls"):
        blocks = (
            f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
            for call in calls
        )
        content = "\n".join(filter(None, [message["content"], *blocks]))
        return {"role": "assistant", "content": content}
    if message["role"] == "tool" and "tool_call_id" in message:
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": result}
    return message
