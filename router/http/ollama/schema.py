"""Request schemas of Ollama's API.

Members that would change the answer and are not supported are refused by name; unknown ones, such
as settings of its engine (`num_ctx`, `num_gpu`), are ignored.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from octavo.client import GenerateOptions, Image, Message, Prompt, ToolCall
from octavo.router.http.bodies import OpenBody
from octavo.router.http.embeddings import Dimensions, Inputs
from octavo.router.http.no_ops import only
from octavo.router.http.schema import strings
from octavo.router.http.tool_arguments import FunctionTool

LATEST = ":latest"
"""Tag that Ollama's clients add to names without one."""
ZERO = re.compile(r"0+(\.0*)?[a-z]*")
"""A duration of nothing: a number of seconds, or a text with a unit."""


def _without_tag(name: object) -> object:
    return name.removesuffix(LATEST) if isinstance(name, str) else name


Name = Annotated[str, BeforeValidator(_without_tag)]
"""A model's name."""


class Options(OpenBody):
    """Sampling parameters and limits."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    num_predict: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(strings)] = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class Named(OpenBody):
    """A body that names a model."""

    model: Name = ""
    name: Name = ""  # the former name of `model`


class Generating(Named):
    """What /api/chat and /api/generate have in common."""

    stream: bool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options_: Options = Field(default_factory=Options, alias="options")
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    keep_alive: Any = None
    request_id: str | None = None
    images: Annotated[Any, only([])] = None

    @property
    def unloads(self) -> bool:
        """Whether the model is to be unloaded, if the body asks for no output."""
        return ZERO.fullmatch(str(self.keep_alive)) is not None

    @property
    def params(self) -> Mapping[str, str]:
        """HTTP names of GenerateRequest fields, where they differ from the usual."""
        return {
            "stop.max_tokens": "options.num_predict",
            "sampling.repetition_penalty": "options.repeat_penalty",
            "constraint": "format",
        }

    def options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""
        given, limit = self.options_, self.options_.num_predict
        thinks = self.think not in (None, False)
        variables: dict[str, Any] = {}
        if self.think is not None:
            variables = {"enable_thinking": thinks, "thinking": thinks}
        if isinstance(self.think, str):
            variables["reasoning_effort"] = self.think
        schema = self.format if isinstance(self.format, dict) else None
        return {
            "model": self.model or self.name,
            "temperature": given.temperature,
            "top_k": given.top_k,
            "top_p": given.top_p,
            "min_p": given.min_p,
            "seed": given.seed,
            "max_tokens": None if limit is None or limit < 0 else limit,
            "stop": given.stop,
            "repetition_penalty": given.repeat_penalty,
            "presence_penalty": given.presence_penalty,
            "frequency_penalty": given.frequency_penalty,
            "json_object": True if self.format == "json" else None,
            "json_schema": schema,
            "fit_limits": True,
            "final_only": None if self.stream is not False else True,
            **({"chat_template_kwargs": variables} if variables else {}),
        }


class CalledFunction(OpenBody):
    """A called function, with its arguments as an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Call(OpenBody):
    """A tool call; Ollama's have no ids."""

    function: CalledFunction


class OllamaMessage(OpenBody):
    """A message of a chat."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    images: list[str] | None = None

    @property
    def parts(self) -> str | Sequence[str | Image]:
        """The content, behind its images."""
        images = [Image(url=f"data:;base64,{data}") for data in self.images or ()]
        return [*images, self.content] if images else self.content


class ChatBody(Generating):
    """The body of POST /api/chat."""

    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: list[FunctionTool] | None = None

    @property
    def empty(self) -> bool:
        """Whether no output is asked for."""
        return not self.messages

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The one conversation, in which calls get ids: results follow in the calls' order."""
        messages: list[Message] = []
        waiting: list[ToolCall] = []
        for i, message in enumerate(self.messages):
            calls = [
                ToolCall(f"call_{i}_{j}", call.function.name, json.dumps(call.function.arguments))
                for j, call in enumerate(message.tool_calls or ())
            ]
            answered = ""
            if message.role == "tool" and waiting:
                named = (call for call in waiting if call.name == message.tool_name)
                call = next(named, waiting[0])
                waiting.remove(call)
                answered = call.id
            elif calls:
                waiting = list(calls)
            messages.append(
                Message(
                    message.role,
                    message.parts,
                    tool_calls=calls,
                    tool_call_id=answered,
                    reasoning=message.thinking or "",
                )
            )
        return [messages]

    def options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""
        tools = [tool.tool() for tool in self.tools or ()]
        return {**super().options(), "tools": tools or None}


class GenerateBody(Generating):
    """The body of POST /api/generate."""

    prompt: str = ""
    system: str = ""
    raw: bool | None = None
    suffix: Annotated[Any, only("")] = None
    template: Annotated[Any, only("")] = None
    context: Annotated[Any, only([])] = None

    @property
    def empty(self) -> bool:
        """Whether no output is asked for."""
        return not self.prompt

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompt as the user's message, or as it is if it is `raw`."""
        if self.raw:
            return [self.prompt]
        system = [Message("system", self.system)] if self.system else []
        return [[*system, Message("user", self.prompt)]]


class EmbedBody(Named):
    """The body of POST /api/embed and of POST /api/embeddings, which has one `prompt`."""

    input: Inputs | None = None
    prompt: str = ""
    truncate: bool | None = True
    dimensions: Dimensions = None
