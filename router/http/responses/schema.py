"""Request schemas of OpenAI's Responses API.

As in chat completions, members that would change the response and are not supported are refused by
name; unknown ones are ignored. Octavo's own parameters are members, too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from octavo.client import GenerateOptions, Image, Message, Prompt, Tool, ToolCall
from octavo.client.requests import tokenize_request
from octavo.common.sampling_parameters import ChatOptions
from octavo.router.http.bodies import OpenBody
from octavo.router.http.conversation import Conversation, unseal
from octavo.router.http.errors import ApiError
from octavo.router.http.messages import check_image, parts
from octavo.router.http.no_ops import Never, only
from octavo.router.http.schema import Reasoning, SingleOutput, StreamOptions
from octavo.v1 import generation_pb2

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log-probabilities."""
SEALED = "reasoning.encrypted_content"
"""Value of `include` that asks for reasoning that only this API's servers read."""


class Part(OpenBody):
    """A text of a message, of a tool's result, or of reasoning."""

    type: Annotated[
        str,
        only("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"),
    ]
    text: str = ""
    refusal: str = ""


class ContentPart(Part):
    """A part of a message: a text, or an image."""

    type: Annotated[
        str,
        only(
            *("input_text", "input_image", "output_text", "text", "refusal"),
            *("reasoning_text", "summary_text"),
        ),
    ]
    image_url: Annotated[str | None, Field(validate_default=True)] = None
    detail: str | None = None
    file_id: Never = None

    @field_validator("image_url")
    @classmethod
    def _check_image(cls, value: str | None, info: ValidationInfo) -> str | None:
        return check_image(value, info, "input_image")

    def part(self) -> str | Image:
        """Convert to a part of the client's `Message`."""
        if self.image_url is not None:
            return Image(url=self.image_url, detail=self.detail or "")
        return self.text or self.refusal


Parts = Annotated[list[Part], BeforeValidator(parts), Field(default_factory=list)]
ContentParts = Annotated[list[ContentPart], BeforeValidator(parts), Field(default_factory=list)]


class Item(OpenBody):
    """A part of the input; a response's output may be sent back unchanged."""

    type: Annotated[
        str,
        only(
            *("message", "reasoning", "function_call", "function_call_output"),
            *("custom_tool_call", "custom_tool_call_output"),
        ),
    ] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: ContentParts
    summary: Parts
    encrypted_content: str | None = None
    call_id: str = ""
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    output: Parts

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.type == "message" and self.role is None:
            raise ApiError(400, "a message of input must have a role", param="input")
        return self

    def message(self, place: str) -> Message:
        """Return the item as a part of the client's `Message`."""
        match self.type:
            case "message":
                return Message(self.role or "", [part.part() for part in self.content])
            case "reasoning":
                return Message("assistant", [], reasoning=self._reasoning(place))
            case "function_call" | "custom_tool_call":
                arguments = self.arguments
                if self.type == "custom_tool_call":
                    arguments = json.dumps({"input": self.input}, ensure_ascii=False)
                call = ToolCall(self.call_id, full_name(self.namespace, self.name), arguments)
                return Message("assistant", [], tool_calls=[call])
        texts = [part.text for part in self.output]
        return Message("tool", texts, tool_call_id=self.call_id)

    def _reasoning(self, place: str) -> str:
        sealed = unseal(self.encrypted_content or "", f"{place}.encrypted_content")
        return sealed or "\n".join(part.text for part in self.content or self.summary)


class CustomFormat(OpenBody):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str = ""


class ResponseTool(OpenBody):
    """A tool that the client runs, or several in a namespace; built-in tools are not supported."""

    type: Annotated[str, only("function", "custom", "namespace")]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    tools: "list[ResponseTool] | None" = None
    defer_loading: Annotated[bool | None, only(False)] = None

    def tool(self, namespace: str | None) -> Tool:
        """Convert to the client's `Tool`; a custom tool has one argument, a string."""
        name, description = full_name(namespace, self.name), self.description or ""
        if self.type == "function":
            return Tool(name, description, self.parameters or {}, strict=bool(self.strict))
        text, strict = {"type": "string"}, False
        if self.format is not None and self.format.syntax == "regex":
            text["pattern"] = f"^(?:{self.format.definition})$"
            strict = True
        elif self.format is not None and self.format.definition:
            description += f"\nIts input keeps to this Lark grammar:\n{self.format.definition}"
        schema = {
            "type": "object",
            "properties": {"input": text},
            "required": ["input"],
            "additionalProperties": False,
        }
        return Tool(name, description, schema, strict=strict)


class OfferedTool(NamedTuple):
    """A tool that the model may call.

    Attributes:
        place: Its name in the request.
        namespace: The namespace that has it, if any.
        tool: The tool.
    """

    place: str
    namespace: str | None
    tool: ResponseTool


class Choice(OpenBody):
    """Tools that the model may or must call."""

    type: Annotated[str, only("function", "custom", "allowed_tools")]
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: "list[Choice] | None" = None

    @property
    def full_name(self) -> str:
        """Name of the tool as the model sees it."""
        return full_name(self.namespace, self.name)


class TextFormat(OpenBody):
    """The form of the text."""

    type: Annotated[str, only("text", "json_object", "json_schema")]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            why = 'must be given if the type is "json_schema", and only then'
            raise ApiError(400, f"text.format.schema {why}", param="text.format.schema")
        return self


class TextConfig(OpenBody):
    """The text of the response."""

    format: TextFormat | None = None
    verbosity: Annotated[str | None, only("medium")] = None


def _items(value: object) -> object:
    """Return the input as a list of items."""
    if not isinstance(value, str):
        return value
    content = [{"type": "input_text", "text": value}]
    return [{"type": "message", "role": "user", "content": content}]


class ResponsesRequest(SingleOutput):
    """The body of POST /v1/responses, and of /v1/responses/input_tokens."""

    input: Annotated[list[Item], BeforeValidator(_items), Field(default_factory=list)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: StreamOptions | None = None

    background: Annotated[bool | None, only(False)] = None
    conversation: Never = None
    moderation: Never = None
    prompt: Never = None
    service_tier: Annotated[str | None, only("auto", "default")] = None

    # Labels without effect: there are no built-in tools, and all prefixes are cached.
    max_tool_calls: int | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    @property
    def offered(self) -> dict[str, OfferedTool]:
        """The tools, by the names that the model sees."""
        allowed = None
        if isinstance(self.tool_choice, Choice) and self.tool_choice.type == "allowed_tools":
            allowed = {choice.full_name for choice in self.tool_choice.tools or ()}
        found: dict[str, OfferedTool] = {}
        for one in self._tools():
            name, place = full_name(one.namespace, one.tool.name), f"{one.place}.name"
            if name in found:
                raise ApiError(400, f"{place} repeats {name[:128]!r}", param=place)
            found[name] = one
        return {name: one for name, one in found.items() if allowed is None or name in allowed}

    @property
    def chat(self) -> Conversation:
        """The messages, with the instructions first."""
        chat = Conversation()
        if self.instructions:
            chat.add(Message("system", [self.instructions]), "instructions")
        for i, item in enumerate(self.input):
            place = f"input[{i}]"
            chat.add(item.message(place), place)
        return chat

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The one conversation."""
        return [self.chat.prompt()]

    @property
    def params(self) -> Mapping[str, str]:
        """HTTP names of GenerateRequest fields, where they differ from the usual."""
        return {
            **self.chat.places,
            **{
                f"chat.tools[{i}].{member}": f"{one.place}.{member}"
                for i, one in enumerate(self.offered.values())
                for member in ("name", "parameters")
            },
            "stop.max_tokens": "max_output_tokens",
            "output.logprobs": "top_logprobs",
            "constraint": "text.format.schema",
            "prompt": "input",
            "chat": "input",
        }

    def chat_options(self) -> ChatOptions:
        """Return the arguments as options of the client's `tokenize`."""
        effort = self.reasoning and self.reasoning.effort
        options: ChatOptions = {
            "chat_template_kwargs": {
                **({"reasoning_effort": effort} if effort else {}),
                **(self.chat_template_kwargs or {}),
            },
            "tools": [one.tool.tool(one.namespace) for one in self.offered.values()] or None,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        choice = self.tool_choice
        if isinstance(choice, Choice):
            named = choice.type != "allowed_tools"
            options["tool_choice"] = Tool(choice.full_name) if named else choice.mode
        elif self.offered or choice == "required":
            options["tool_choice"] = choice
        return options

    def options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""
        form = None if self.text is None else self.text.format
        options: GenerateOptions = {
            **super().options(),
            **self.chat_options(),
            "max_tokens": self.max_output_tokens,
            "logprobs": (self.top_logprobs or 0) if LOGPROBS in (self.include or ()) else None,
        }
        if form is not None and form.type == "json_object":
            options["json_object"] = True
        elif form is not None and form.schema_ is not None:
            options["json_schema"] = form.schema_
            options["lenient_schema"] = not form.strict
        return options

    def tokenize_request(self) -> generation_pb2.TokenizeRequest:
        """Return the request that counts the prompt's tokens."""
        return tokenize_request(self.prompts[0], self.model, self.chat_options())

    def with_input(self, items: Sequence[Item]) -> Self:
        """Return the same request with another input."""
        return self.model_copy(update={"input": list(items)})

    def _tools(self) -> Iterator[OfferedTool]:
        for i, tool in enumerate(self.tools or ()):
            if tool.type != "namespace":
                yield OfferedTool(f"tools[{i}]", None, tool)
            for j, inner in enumerate(tool.tools or ()):
                yield OfferedTool(f"tools[{i}].tools[{j}]", tool.name, inner)


def full_name(namespace: str | None, name: str) -> str:
    """Return a tool's name as the model sees it."""
    return f"{namespace}.{name}" if namespace else name
