"""Request schemas of Anthropic's Messages API.

As in OpenAI's API, members that would change the response and are not supported are refused by
name; unknown ones are ignored. Octavo's own parameters are members, too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from octavo.client import GenerateOptions, Image, Message, Prompt, Tool, ToolCall
from octavo.client.requests import tokenize_request
from octavo.common.sampling_parameters import ChatOptions
from octavo.router.http.bodies import OpenBody
from octavo.router.http.conversation import Conversation, unseal
from octavo.router.http.errors import ApiError
from octavo.router.http.messages import TextPart, check_image, parts
from octavo.router.http.no_ops import Never, only
from octavo.router.http.schema import SingleOutput
from octavo.v1 import generation_pb2

BILLING = "x-anthropic-billing-header:"
"""Prefix of the system text in which Claude Code names itself; it is no part of the prompt."""


class Source(OpenBody):
    """Where an image is."""

    type: Annotated[str, only("base64", "url")]
    media_type: str = ""
    data: str = ""
    url: Annotated[str, Field(validate_default=True)] = ""

    @field_validator("url")
    @classmethod
    def _check_url(cls, value: str, info: ValidationInfo) -> str:
        return check_image(value or None, info, "url") or ""

    def image(self) -> Image:
        """Convert to the client's `Image`."""
        data_url = f"data:{self.media_type};base64,{self.data}"
        return Image(url=self.url if self.type == "url" else data_url)


class Block(OpenBody):
    """A part of a message."""

    type: Annotated[
        str,
        only("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    ]
    source: Source | None = None
    text: str = ""
    thinking: str = ""
    signature: str = ""
    data: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    content: Annotated[list[TextPart], BeforeValidator(parts), Field(default_factory=list)]
    is_error: bool | None = None

    def message(self, role: str, place: str) -> Message:
        """Return the block as the only part of the client's `Message`."""
        match self.type:
            case "tool_use":
                arguments = json.dumps(self.input, ensure_ascii=False)
                call = ToolCall(self.id, self.name, arguments)
                return Message(role, [], tool_calls=[call])
            case "tool_result":
                texts = [part.text for part in self.content]
                result = ["Error:", *texts] if self.is_error else texts
                return Message("tool", result, tool_call_id=self.tool_use_id)
            case "thinking":
                return Message(role, [], reasoning=self._thinking(place))
            case "redacted_thinking":
                return Message(role, [], reasoning=unseal(self.data, f"{place}.data") or "")
            case "image":
                if self.source is None:
                    raise ApiError(400, f"{place} must have a source", param=f"{place}.source")
                return Message(role, [self.source.image()])
        return Message(role, [self.text])

    def _thinking(self, place: str) -> str:
        """Return the reasoning, which the signature has, too; for omitted reasoning it alone."""
        signed = unseal(self.signature, f"{place}.signature")
        if signed is not None and self.thinking not in ("", signed):
            place = f"{place}.thinking"
            raise ApiError(400, f"{place} is not what its signature is for", param=place)
        return self.thinking or signed or ""


class InputMessage(OpenBody):
    """A message; a response's content may be sent back unchanged."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], BeforeValidator(parts)]


class ClientTool(OpenBody):
    """A tool that the client runs; the tools of Anthropic's servers are not supported."""

    type: Annotated[str | None, only("custom")] = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    defer_loading: Annotated[bool | None, only(False)] = None


class Choice(OpenBody):
    """Whether tools are called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None

    @property
    def choice(self) -> str | Tool:
        """The choice as the client's `tool_choice`."""
        if self.type == "tool":
            return Tool(self.name)
        return "required" if self.type == "any" else self.type


class Thinking(OpenBody):
    """Whether the model reasons, and whether its reasoning is shown."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(OpenBody):
    """The JSON Schema of the text."""

    type: Annotated[str, only("json_schema")]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(OpenBody):
    """The form of the text, and the effort of reasoning."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class CountRequest(SingleOutput):
    """The body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[InputMessage], Field(min_length=1)]
    system: Annotated[list[TextPart], BeforeValidator(parts), Field(default_factory=list)]
    thinking: Thinking | None = None
    tools: list[ClientTool] | None = None
    tool_choice: Choice | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None  # the former name of `output_config.format`
    container: Never = None
    mcp_servers: Annotated[Any, only([])] = None

    # Labels without effect: all prefixes are cached.
    cache_control: dict[str, Any] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def conversation(self) -> Conversation:
        """The messages, with the system's text first.

        Raises:
            ApiError: Sealed reasoning was changed.
        """
        chat = Conversation()
        for part in self.system:
            if not part.text.startswith(BILLING):
                chat.add(Message("system", [part.text]), "system")
        for i, message in enumerate(self.messages):
            for j, block in enumerate(message.content):
                place = f"messages[{i}].content[{j}]"
                chat.add(block.message(message.role, place), f"messages[{i}]")
        return chat

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The one conversation."""
        return [self.conversation.prompt()]

    @property
    def params(self) -> Mapping[str, str]:
        """HTTP names of GenerateRequest fields, where they differ from the usual."""
        form = "output_format" if self.output_format else "output_config.format"
        return {
            **self.conversation.places,
            **dict(self._tool_params()),
            "stop.max_reasoning_tokens": "thinking.budget_tokens",
            "stop.strings": "stop_sequences",
            "constraint": f"{form}.schema",
            "prompt": "messages",
        }

    def chat_options(self) -> ChatOptions:
        """Return the arguments as options of the client's `tokenize`."""
        choice = self.tool_choice
        parallel = None if choice is None else choice.disable_parallel_tool_use
        options: ChatOptions = {
            "chat_template_kwargs": {**self._variables(), **(self.chat_template_kwargs or {})},
            "tools": [_tool(tool) for tool in self.tools or ()] or None,
            "parallel_tool_calls": None if parallel is None else not parallel,
        }
        if choice is not None and (self.tools or choice.type in ("any", "tool")):
            options["tool_choice"] = choice.choice
        if self.messages[-1].role == "assistant":  # the response continues it
            options["continue_final_message"] = True
        return options

    def tokenize_request(self) -> generation_pb2.TokenizeRequest:
        """Return the request that counts the prompt's tokens."""
        return tokenize_request(self.prompts[0], self.model, self.chat_options())

    def _variables(self) -> dict[str, Any]:
        """Return the variables by which chat templates turn reasoning on, and set its effort."""
        variables: dict[str, Any] = {}
        if self.thinking is not None:
            enabled = self.thinking.type != "disabled"
            variables |= {"enable_thinking": enabled, "thinking": enabled}
        if self.output_config is not None and (effort := self.output_config.effort):
            variables["reasoning_effort"] = "xhigh" if effort == "max" else effort
        return variables

    def _tool_params(self) -> Iterator[tuple[str, str]]:
        for i in range(len(self.tools or ())):
            yield f"chat.tools[{i}].parameters", f"tools[{i}].input_schema"
            yield f"chat.tools[{i}].name", f"tools[{i}].name"


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: int
    stop_sequences: list[str] | None = None

    @property
    def shows_reasoning(self) -> bool:
        """Whether the response has blocks of thinking."""
        return self.thinking is None or self.thinking.type != "disabled"

    @property
    def omits_reasoning(self) -> bool:
        """Whether blocks of thinking have no text."""
        return self.thinking is not None and self.thinking.display == "omitted"

    @property
    def eager_tools(self) -> frozenset[str]:
        """Tools whose input is streamed as the model writes it, be it valid JSON or not."""
        return frozenset(tool.name for tool in self.tools or () if tool.eager_input_streaming)

    def options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""
        thinking, config = self.thinking, self.output_config
        form = config.format if config is not None and config.format else self.output_format
        return {
            **super().options(),
            **self.chat_options(),
            "max_tokens": self.max_tokens,
            "max_reasoning_tokens": None if thinking is None else thinking.budget_tokens,
            "stop": self.stop_sequences,
            "json_schema": None if form is None else form.schema_,
        }


def _tool(tool: ClientTool) -> Tool:
    strict = bool(tool.strict)
    return Tool(tool.name, tool.description or "", tool.input_schema, strict=strict)
