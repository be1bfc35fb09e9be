"""Request schemas of the OpenAI API.

OpenAI's and vLLM's arguments that Octavo does not support are rejected, not ignored; `no_ops.py`
lists those that are accepted with values that change nothing. Arguments that neither API has are
ignored, as vLLM does; a header of the response names them.
"""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import (
    BeforeValidator,
    Field,
    PlainValidator,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from octavo.client import GenerateOptions, Prompt
from octavo.common.sampling_parameters import PARAMETERS, TYPES, ChatOptions
from octavo.router.http import no_ops
from octavo.router.http.bodies import OpenBody
from octavo.router.http.errors import WRONG_TYPE, ApiError
from octavo.router.http.messages import ChatMessage
from octavo.router.http.no_ops import only
from octavo.router.http.output_forms import FormArguments
from octavo.router.http.tool_arguments import ToolArguments

COMPLETION_TOKENS = 16
"""Default max_tokens of /v1/completions, as in OpenAI's API."""
MAX_PROMPTS = 128
"""Maximum prompts of a request to /v1/completions; each becomes a Generate call."""
SEEDS = 1 << 64
"""Number of seeds: 64 bits, signed in OpenAI's API and unsigned in Octavo's."""
ALL_TOKENS = -1
"""vLLM's top_k value for all tokens."""
FITTING_TOKENS = -1
"""vLLM's truncate_prompt_tokens value for as many tokens as fit."""


def strings(value: object) -> object:
    """Return a list; a single string becomes a list of one."""
    return [value] if isinstance(value, str) else value


def prompts(value: object) -> list[str] | list[list[int]]:
    """Return a list of prompts; `prompt` has four forms."""
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


class StreamOptions(OpenBody):
    """Streaming options.

    Attributes:
        include_usage: Whether the last chunk reports token usage.
        continuous_usage_stats: Whether every chunk reports the usage so far.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Annotated[bool, only(False)] = False


HTTP_NAMES = [name for name, parameter in PARAMETERS.items() if parameter.http]
CHAT_NAMES = [name for name in HTTP_NAMES if PARAMETERS[name].message == "chat"]
"""Parameters of a chat's layout, only in /v1/chat/completions and /tokenize."""
PARAMETER_NAMES = [name for name in HTTP_NAMES if name not in CHAT_NAMES]
OPENAI_NAMES = {
    *("n", "stop", "max_tokens", "include_stop", "logit_bias", "logprobs"),
    *("beam_width", "length_penalty", "early_stopping"),
}
"""Parameters of the completions APIs alone, or that other APIs name otherwise."""
SINGLE_OUTPUT_NAMES = [
    *(name for name in PARAMETER_NAMES if name not in OPENAI_NAMES),
    *("chat_template_kwargs", "allow_special_tokens"),
]
"""Parameters of APIs whose answers are one output."""
MAX_REQUEST_ID = 100
"""Maximum characters of `request_id`, which becomes part of the response's id."""
RequestId: TypeAlias = Annotated[str, Field(pattern=r"^[!-~]+$", max_length=MAX_REQUEST_ID)]


def _declared(names: Iterable[str]) -> dict[str, Any]:
    """Return parameters as fields for pydantic's `create_model`."""
    return {name: (TYPES[name], None) for name in names}


if TYPE_CHECKING:
    Declared = OpenBody
    DeclaredSingleOutput = OpenBody
    DeclaredChatOptions = OpenBody
    DeclaredChat = OpenBody
    DeclaredCompletion = OpenBody
else:
    # One member per parameter in HTTP; those that need more are declared below.
    Declared = create_model(
        "Declared", __base__=OpenBody, **_declared(PARAMETER_NAMES), **no_ops.members(no_ops.BOTH)
    )
    DeclaredSingleOutput = create_model(
        "DeclaredSingleOutput",
        __base__=OpenBody,
        **_declared(SINGLE_OUTPUT_NAMES),
        **no_ops.members(no_ops.BOTH | no_ops.SINGLE_OUTPUT),
    )
    DeclaredChatOptions = create_model(
        "DeclaredChatOptions",
        __base__=OpenBody,
        **_declared(CHAT_NAMES),
        **no_ops.members(no_ops.LAYOUT),
    )
    DeclaredChat = create_model("DeclaredChat", __base__=OpenBody, **no_ops.members(no_ops.CHAT))
    DeclaredCompletion = create_model(
        "DeclaredCompletion",
        __base__=OpenBody,
        **dict.fromkeys(CHAT_NAMES, (no_ops.Never, None)),
        **no_ops.members(no_ops.COMPLETION),
    )


class SpecialTokens(OpenBody):
    """Whether texts contain special tokens, by Octavo's argument and by vLLM's."""

    keep_special_tokens: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def keeps_special_tokens(self) -> bool | None:
        """Whether texts keep special tokens; None: the default. Octavo's argument wins."""
        if self.keep_special_tokens is None and self.skip_special_tokens is not None:
            return not self.skip_special_tokens
        return self.keep_special_tokens


class Parameters(FormArguments, SpecialTokens, Declared):
    """The arguments of both APIs: Octavo's, OpenAI's, and the rejected ones."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    stop: Annotated[list[str] | None, BeforeValidator(strings)] = None
    logit_bias: dict[int, float] | None = None
    seed: Annotated[int, Field(ge=-SEEDS // 2, lt=SEEDS)] | None = None
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    include_stop: bool | None = None
    top_k: int | None = None
    truncate_prompt_tokens: int | None = None
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    max_reasoning_tokens: int | None = None

    # vLLM's names.
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    request_id: RequestId | None = None
    thinking_token_budget: int | None = None

    # Labels without effect.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None

    @model_validator(mode="after")
    def _check_reasoning(self) -> Self:
        if len({self.max_reasoning_tokens, self.thinking_token_budget} - {None}) > 1:
            raise ApiError(
                400,
                "max_reasoning_tokens and thinking_token_budget exclude each other",
                param="thinking_token_budget",
            )
        return self

    @model_validator(mode="after")
    def _check_beam(self) -> Self:
        if self.beam_width is None:
            for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
                if getattr(self, name) not in (None, neutral):
                    raise ApiError(
                        400,
                        f"{name} needs beam_width: it changes a beam search only; without"
                        f" beam_width it may be {json.dumps(neutral)}",
                        param=name,
                    )
        else:
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

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ApiError(
                400,
                "prompt_logprobs cannot be streamed; set stream to false",
                param="prompt_logprobs",
            )
        return self

    @property
    def choices(self) -> int:
        """Number of outputs per prompt; with beam search, the best ones."""
        return 1 if self.n is None else self.n

    @property
    def usage_chunks(self) -> bool:
        """Whether every chunk of the stream reports token usage."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def keeps_ending(self) -> bool:
        """Whether an output's text includes the stop string or token that ended it."""
        return bool(self.include_stop or self.include_stop_str_in_output)

    @property
    def shows_ending(self) -> bool:
        """Whether log-probabilities include the token that ended an output."""
        return self.keeps_ending or bool(self.return_token_ids)

    @property
    def prompt_only(self) -> bool:
        """Whether the request wants only the prompt and its log-probabilities."""
        return False

    def options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""
        parameters = {name: getattr(self, name) for name in PARAMETER_NAMES}
        if self.beam_width is None:
            parameters["length_penalty"] = parameters["early_stopping"] = None
        return {
            **cast("GenerateOptions", parameters),
            "n": self.n if self.beam_width is None else None,
            "seed": None if self.seed is None else self.seed % SEEDS,
            "top_k": 0 if self.top_k == ALL_TOKENS else self.top_k,
            "include_stop": self.keeps_ending or None,
            "keep_special_tokens": self.keeps_special_tokens,
            "truncate_prompt_tokens": (
                0 if self.truncate_prompt_tokens == FITTING_TOKENS else self.truncate_prompt_tokens
            ),
            "token_ids": self.usage_chunks or self.return_token_ids or None,
            "prompt_token_ids": self.return_token_ids or None,
            "prompt_logprobs": self.prompt_logprobs,
            "final_only": not self.stream or None,
            "max_reasoning_tokens": (
                self.max_reasoning_tokens
                if self.thinking_token_budget is None
                else self.thinking_token_budget
            ),
            **self.form_options(),
        }

    @property
    def params(self) -> dict[str, str]:
        """HTTP names that this request used for GenerateRequest fields, where they differ."""
        budget = "thinking_token_budget"
        other = {} if self.thinking_token_budget is None else {"stop.max_reasoning_tokens": budget}
        return {**self.form_params(), **other}


class SingleOutput(DeclaredSingleOutput):
    """Octavo's parameters in APIs whose answers are one output of a chat.

    Limits above what is possible are lowered: these APIs' clients do not know a model's context,
    and send the same large ones to all.
    """

    model: str = ""
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    request_id: RequestId | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    fit_limits: bool | None = None

    def options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""
        parameters = {name: getattr(self, name) for name in SINGLE_OUTPUT_NAMES}
        return {
            **cast("GenerateOptions", parameters),
            "fit_limits": self.fit_limits is not False,
            "final_only": not self.stream or None,
        }


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""Reasoning effort, for chat templates that have such a variable."""


class Reasoning(OpenBody):
    """`reasoning_effort` in the form of OpenRouter and OpenAI's Responses API."""

    effort: Effort | None = None


class ChatLayoutOptions(ToolArguments, DeclaredChatOptions):
    """Arguments for the model's chat template.

    Attributes:
        reasoning_effort: Variable of the template, unless `chat_template_kwargs` sets it.
        reasoning: Another form of `reasoning_effort`.
    """

    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None

    @model_validator(mode="after")
    def _check_effort(self) -> Self:
        within = None if self.reasoning is None else self.reasoning.effort
        if len({self.reasoning_effort, within} - {None}) > 1:
            raise ApiError(
                400, "reasoning_effort and reasoning.effort differ", param="reasoning_effort"
            )
        return self

    def chat_options(self) -> ChatOptions:
        """Return the arguments as options of the client's `tokenize`."""
        options = cast("ChatOptions", {name: getattr(self, name) for name in CHAT_NAMES})
        effort = self.reasoning_effort or (self.reasoning and self.reasoning.effort)
        if effort is not None:
            variables = options.get("chat_template_kwargs") or {}
            options["chat_template_kwargs"] = {"reasoning_effort": effort, **variables}
        return {**options, **self.tool_options()}


class ChatRequest(Parameters, ChatLayoutOptions, DeclaredChat):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: int | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The one conversation."""
        return [[message.message() for message in self.messages]]

    @property
    def params(self) -> dict[str, str]:
        """HTTP names that this request used for GenerateRequest fields, where they differ."""
        length = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {
            **super().params,
            "stop.max_tokens": length,
            "output.logprobs": "top_logprobs",
            "prompt": "messages",
            "chat": "messages",
        }

    def options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""
        length = self.max_completion_tokens  # OpenAI's newer name wins
        if length is None:
            length = self.max_tokens
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return {
            **super().options(),
            **self.chat_options(),
            "max_tokens": length,
            "logprobs": logprobs,
        }


class CompletionRequest(Parameters, DeclaredCompletion):
    """The body of POST /v1/completions."""

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(prompts)]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        if len(self.prompt) > MAX_PROMPTS:
            raise ApiError(
                400,
                f"prompt may hold at most {MAX_PROMPTS}; it has {len(self.prompt)}",
                param="prompt",
            )
        if self.best_of not in (None, self.choices):
            raise ApiError(
                400, f"best_of is supported only as n, here {self.choices}", param="best_of"
            )
        if self.echo and self.suffix:
            raise ApiError(400, "echo and suffix exclude each other", param="suffix")
        return self

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts, in order; the router rejects empty ones."""
        return self.prompt

    @property
    def params(self) -> dict[str, str]:
        """HTTP names that this request used for GenerateRequest fields, where they differ."""
        scores = "logprobs" if self.prompt_logprobs is None else "prompt_logprobs"
        return {**super().params, "output.prompt_logprobs": scores}

    @property
    def shows_ending(self) -> bool:
        """Whether log-probabilities include the token that ended an output.

        True with `echo`, so that clients find the prompt's by counting from the end.
        """
        return super().shows_ending or bool(self.echo)

    @property
    def prompt_only(self) -> bool:
        """Whether the request wants only the prompt and its log-probabilities."""
        return bool(self.echo) and self.max_tokens == 0

    def options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""
        length = COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        options = super().options()
        scores = self.logprobs if self.echo else None
        return {
            **options,
            # Generate needs at least one output token; the response hides it.
            "max_tokens": 1 if self.prompt_only else length,
            "logprobs": self.logprobs,
            "prompt_logprobs": scores if self.prompt_logprobs is None else self.prompt_logprobs,
            "prompt_token_ids": self.echo or self.return_token_ids or None,
            "suffix": self.suffix,
        }


ApiRequest: TypeAlias = ChatRequest | CompletionRequest
