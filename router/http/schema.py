"""Schemas of requests to the OpenAI API.

An argument that Octavo does not serve is refused, never passed over: an answer
that ignores `tools` or `response_format` is a wrong answer. Those that OpenAI's
own clients may send with a value that changes nothing are taken with that value.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from octavo.client import GenerateOptions, Message, Prompt
from octavo.common.sampling_parameters import PARAMETERS, TYPES
from octavo.router.http.errors import UNSUPPORTED, WRONG_TYPE, ApiError

COMPLETION_TOKENS = 16
"""What /v1/completions makes where max_tokens is not given, as OpenAI's does."""
MAX_PROMPTS = 128
"""Most prompts of one request to /v1/completions, each a Generate call."""
SEEDS = 1 << 64
"""OpenAI's seeds are signed, Octavo's are not; both have 64 bits."""


def _only(*harmless: object) -> AfterValidator:
    """Refuses every value of an argument but null and `harmless`."""
    taken = " or ".join(json.dumps(value) for value in harmless if value)
    message = f"is supported only as {taken}" if taken else "is not supported"

    def check(value: object) -> object:
        if value is not None and value not in harmless:
            raise PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})
        return value

    return AfterValidator(check)


def _parts(content: object) -> object:
    """Return a message's content as a list of parts."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if isinstance(content, list):
        return content
    raise PydanticCustomError(WRONG_TYPE, "must be a string or a list of parts")


def _strings(value: object) -> object:
    """Return a list; a single string becomes a list of one."""
    return [value] if isinstance(value, str) else value


def _prompts(value: object) -> list[str] | list[list[int]]:
    """Return a list of prompts, from any of the four forms of `prompt`."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_tokens(value):
            return [value]
        if all(isinstance(part, str) for part in value) or all(map(_is_tokens, value)):
            return value
    raise PydanticCustomError(
        WRONG_TYPE,
        "must be a string, a list of strings, a list of token ids or a list of such lists",
    )


def _is_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(part) is int for part in value)


Never: TypeAlias = Annotated[Any, _only()]


class Strict(BaseModel):
    """JSON of which every member is known and of its type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(Strict):
    """Options of a stream.

    Attributes:
        include_usage: A last chunk counts the tokens.
        continuous_usage_stats: So does every other one, as far as it has come.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, _only(False)] = False


class TextPart(Strict):
    """A piece of a message; of the kinds there are, text is served."""

    type: Annotated[str, _only("text")]
    text: str = ""
    # Of other kinds: refused by `type`, and named here so that it is what is complained of.
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatMessage(Strict):
    """One message. An answer's message may be sent back as it was received."""

    role: str
    content: Annotated[list[TextPart], BeforeValidator(_parts)] = []
    tool_call_id: str | None = None
    name: Never = None
    refusal: Never = None
    annotations: Annotated[Any, _only([])] = None
    audio: Never = None
    function_call: Never = None
    tool_calls: Annotated[Any, _only([])] = None

    def message(self) -> Message:
        """Return the message as the contract has it; parts become lines of one text."""
        role = "system" if self.role == "developer" else self.role
        return Message(role, "\n".join(part.text for part in self.content))


PARAMETER_NAMES = [name for name, parameter in PARAMETERS.items() if parameter.http]

if TYPE_CHECKING:
    Declared = Strict
else:
    # One member for each parameter that HTTP has; those that need more are declared below.
    Declared = create_model(
        "Declared", __base__=Strict, **{name: (TYPES[name], None) for name in PARAMETER_NAMES}
    )


class Parameters(Declared):
    """The members of both APIs: Octavo's parameters, OpenAI's, and those that are refused."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(_strings)] = None
    logit_bias: dict[int, float] | None = None
    seed: Annotated[int, Field(ge=-SEEDS // 2, lt=SEEDS)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    beam_width: int | None = None

    # Labels, from which nothing follows.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check_beam(self) -> Self:
        if self.beam_width is not None:
            if self.stream:
                raise ApiError(
                    400,
                    "beam_width cannot be streamed: a search's outputs come when it ends",
                    param="beam_width",
                )
            if (self.n or 1) > self.beam_width:
                raise ApiError(
                    400, f"n must be in [1, {self.beam_width}], up to beam_width", param="n"
                )
        return self

    @property
    def choices(self) -> int:
        """Number of answers per prompt; with beam search, the best ones."""
        return 1 if self.n is None else self.n

    @property
    def usage_chunks(self) -> bool:
        """Whether every chunk of the stream counts tokens."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def options(self) -> GenerateOptions:
        """Return the options as the client's `generate` takes them."""
        given = {name: getattr(self, name) for name in PARAMETER_NAMES}
        return {
            **cast("GenerateOptions", given),
            "n": self.n if self.beam_width is None else None,
            "seed": None if self.seed is None else self.seed % SEEDS,
            "token_ids": self.usage_chunks or None,
            "final_only": not self.stream or None,
        }


class ChatRequest(Parameters):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    audio: Never = None
    function_call: Annotated[Any, _only("none")] = None
    functions: Annotated[Any, _only([])] = None
    modalities: Annotated[Any, _only(["text"])] = None
    moderation: Never = None
    parallel_tool_calls: Annotated[Any, _only(True, False)] = None
    prediction: Never = None
    prompt_cache_options: Never = None
    prompt_cache_retention: Never = None
    reasoning_effort: Annotated[Any, _only("none")] = None
    response_format: Annotated[Any, _only({"type": "text"})] = None
    service_tier: Annotated[Any, _only("auto", "default")] = None
    store: Annotated[Any, _only(False)] = None
    tool_choice: Annotated[Any, _only("none", "auto")] = None
    tools: Annotated[Any, _only([])] = None
    verbosity: Never = None
    web_search_options: Never = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ApiError(
                400, "max_tokens and max_completion_tokens exclude each other", param="max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The one conversation."""
        return [[message.message() for message in self.messages]]

    @property
    def params(self) -> dict[str, str]:
        """The HTTP names of fields of GenerateRequest."""
        length = "max_tokens" if self.max_tokens is not None else "max_completion_tokens"
        return {
            "stop.max_tokens": length,
            "output.logprobs": "top_logprobs",
            "prompt": "messages",
            "chat": "messages",
        }

    def options(self) -> GenerateOptions:
        """Return the options as the client's `generate` takes them."""
        length = self.max_tokens if self.max_tokens is not None else self.max_completion_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return {**super().options(), "max_tokens": length, "logprobs": logprobs}


class CompletionRequest(Parameters):
    """The body of POST /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_prompts)]
    logprobs: int | None = None

    best_of: Annotated[Any, _only(1)] = None
    echo: Annotated[Any, _only(False)] = None
    suffix: Annotated[Any, _only("")] = None

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if len(self.prompt) > MAX_PROMPTS:
            raise ApiError(
                400,
                f"prompt may hold at most {MAX_PROMPTS}; it has {len(self.prompt)}",
                param="prompt",
            )
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts, in order; one that is empty is the router's to refuse."""
        return self.prompt

    @property
    def params(self) -> dict[str, str]:
        """The HTTP names of fields of GenerateRequest: their own names."""
        return {}

    def options(self) -> GenerateOptions:
        """Return the options as the client's `generate` takes them."""
        length = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return {**super().options(), "max_tokens": length, "logprobs": self.logprobs}


ApiRequest: TypeAlias = ChatRequest | CompletionRequest
