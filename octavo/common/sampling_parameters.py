"""The parameters of a request, declared once each.

`GenerateOptions` defines the client's keyword arguments and their fields in GenerateRequest, the
flags of `octavo generate` and `chat`, the members of HTTP requests, the range checks of router and
engine, the engine's defaults, and docs/parameters.md. `SamplingParams` has the engine's form of
those that affect sampling.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypedDict, get_type_hints

from google.protobuf.message import Message

from octavo.common.tools import Schema, Tool

MAX_LOGPROBS = 20
MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class Range:
    """Allowed numbers: `[low, high]`, or `(low, high]` if `above`.

    Attributes:
        high: A number, or "max_outputs" for the engine's limit of outputs per request.
    """

    low: float
    high: float | Literal["max_outputs"]
    above: bool = False

    def __str__(self) -> str:
        high = "the engine's max_outputs" if isinstance(self.high, str) else f"{self.high:g}"
        return f"{'(' if self.above else '['}{self.low:g}, {high}]"


@dataclass(frozen=True, slots=True)
class Parameter:
    """Declaration of one parameter.

    Attributes:
        path: Field in GenerateRequest.
        help: Description, with the unit.
        range: Allowed numbers; None: all of the type, or checked elsewhere.
        default: Value if a request does not set it, if any.
        flags: Flags on the command line; empty: no flag. Default: the parameter's name.
        file: Whether the flag names a file with the value.
        http: Whether HTTP requests have a member of the same name.
        generation_config: Key of the model's default in its generation_config.json, if any.
    """

    path: str
    help: str
    range: Range | None = None
    default: float | None = None
    flags: tuple[str, ...] | None = None
    file: bool = False
    http: bool = True
    generation_config: str | None = None

    def shown_flags(self, name: str) -> tuple[str, ...]:
        """Return the command-line flags of a parameter."""
        return (f"--{name.replace('_', '-')}",) if self.flags is None else self.flags

    @property
    def field(self) -> str:
        """Name of the field."""
        return self.path.rpartition(".")[2]

    @property
    def message(self) -> str:
        """Path of the message with the field; "" for GenerateRequest itself."""
        return self.path.rpartition(".")[0]


class ChatOptions(TypedDict, total=False):
    """Options of the chat template. None or unset: the server's default."""

    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        Parameter("chat.chat_template_kwargs", "Variables of the model's chat template.", flags=()),
    ]
    add_generation_prompt: Annotated[
        bool | None,
        Parameter(
            "chat.add_generation_prompt",
            "Open the assistant's answer after the last message.",
            flags=(),
        ),
    ]
    continue_final_message: Annotated[
        bool | None,
        Parameter(
            "chat.continue_final_message",
            "End the prompt within the last message, so that the model continues it.",
            flags=(),
        ),
    ]
    allow_special_tokens: Annotated[
        bool | None,
        Parameter(
            "chat.allow_special_tokens",
            "Let chat texts spell control tokens; the server must allow it.",
            flags=(),
        ),
    ]
    tools: Annotated[
        Sequence[Tool | Mapping[str, Any]] | None,
        Parameter(
            "chat.tools", "Tools that the model may call, a JSON array.", file=True, http=False
        ),
    ]
    tool_choice: Annotated[
        str | Tool | None,
        Parameter(
            "chat.tool_choice",
            '"auto", "none" or "required"; or the name of a tool that must be called.',
            http=False,
        ),
    ]
    parallel_tool_calls: Annotated[
        bool | None,
        Parameter(
            "chat.parallel_tool_calls", "Whether one output may call several tools.", flags=()
        ),
    ]


class GenerateOptions(ChatOptions, total=False):
    """Options of `generate` besides the prompt. None or unset: the server's default."""

    model: Annotated[
        str | None, Parameter("model", "Name of the model; needed if several are served.")
    ]
    request_id: Annotated[
        str | None,
        Parameter("request_id", "Name of the request in logs and traces.", flags=(), http=False),
    ]
    priority: Annotated[
        int | None,
        Parameter(
            "priority",
            "Priority: higher values are served sooner.",
            Range(-MAX_PRIORITY, MAX_PRIORITY),
            default=0,
        ),
    ]
    cache_salt: Annotated[
        str | None,
        Parameter(
            "cache_salt",
            "Cached prefixes are shared only with requests of the same salt.",
            flags=(),
        ),
    ]
    bad_words: Annotated[
        Sequence[str] | None,
        Parameter("bad_words", "Texts that outputs must not contain.", flags=()),
    ]
    truncate_prompt_tokens: Annotated[
        int | None,
        Parameter(
            "truncate_prompt_tokens",
            "Keep only this many of the prompt's last tokens; 0: as many as fit.",
            flags=(),
        ),
    ]
    suffix: Annotated[
        str | None,
        Parameter(
            "suffix",
            "Text after the output, for models that fill in the middle.",
            flags=(),
            http=False,
        ),
    ]
    max_tokens: Annotated[
        int | None,
        Parameter(
            "stop.max_tokens", "Maximum tokens per output.", generation_config="max_new_tokens"
        ),
    ]
    min_tokens: Annotated[
        int | None,
        Parameter("stop.min_tokens", "Minimum tokens per output.", default=0),
    ]
    stop: Annotated[
        str | Sequence[str] | None,
        Parameter("stop.strings", "Text that ends an output; repeatable."),
    ]
    stop_token_ids: Annotated[
        Sequence[int] | None,
        Parameter("stop.token_ids", "Token ids that end an output.", flags=()),
    ]
    ignore_eos: Annotated[
        bool | None,
        Parameter("stop.ignore_eos", "Continue past the model's end-of-sequence tokens."),
    ]
    include_stop: Annotated[
        bool | None,
        Parameter(
            "stop.include_in_output",
            "Keep the stop string or token in the output.",
            flags=(),
        ),
    ]
    max_reasoning_tokens: Annotated[
        int | None,
        Parameter(
            "stop.max_reasoning_tokens",
            "Maximum tokens of reasoning per output; then its end is forced.",
        ),
    ]
    fit_limits: Annotated[
        bool | None,
        Parameter(
            "stop.fit_limits",
            "Lower max_tokens and max_reasoning_tokens to what is possible instead of refusing "
            "them.",
            flags=(),
        ),
    ]
    temperature: Annotated[
        float | None,
        Parameter(
            "sampling.temperature",
            "Divisor of the logits; 0 selects the most likely token.",
            Range(0, 100),
            default=1,
            flags=("--temperature", "-t"),
            generation_config="temperature",
        ),
    ]
    top_p: Annotated[
        float | None,
        Parameter(
            "sampling.top_p",
            "Keep the smallest set of most likely tokens with this total probability.",
            Range(0, 1, above=True),
            default=1,
            generation_config="top_p",
        ),
    ]
    top_k: Annotated[
        int | None,
        Parameter(
            "sampling.top_k",
            "Keep this many of the most likely tokens; 0: all.",
            default=0,
            generation_config="top_k",
        ),
    ]
    min_p: Annotated[
        float | None,
        Parameter(
            "sampling.min_p",
            "Keep tokens with at least this fraction of the most likely token's probability.",
            Range(0, 1),
            default=0,
            generation_config="min_p",
        ),
    ]
    repetition_penalty: Annotated[
        float | None,
        Parameter(
            "sampling.repetition_penalty",
            "Divisor of positive, and factor of negative, logits of tokens in prompt or output.",
            Range(0, 100, above=True),
            default=1,
            generation_config="repetition_penalty",
        ),
    ]
    presence_penalty: Annotated[
        float | None,
        Parameter(
            "sampling.presence_penalty",
            "Subtracted from the logit of every token in the output.",
            Range(-2, 2),
            default=0,
        ),
    ]
    frequency_penalty: Annotated[
        float | None,
        Parameter(
            "sampling.frequency_penalty",
            "Subtracted from a token's logit for each time it is in the output.",
            Range(-2, 2),
            default=0,
        ),
    ]
    n: Annotated[
        int | None,
        Parameter(
            "sampling.n", "Outputs per prompt.", Range(1, "max_outputs"), default=1, flags=("-n",)
        ),
    ]
    logit_bias: Annotated[
        Mapping[int, float] | None,
        Parameter("sampling.logit_bias", "Added to the logits, by token id.", flags=()),
    ]
    allowed_token_ids: Annotated[
        Sequence[int] | None,
        Parameter("sampling.allowed_token_ids", "The only tokens that are sampled.", flags=()),
    ]
    seed: Annotated[
        int | None, Parameter("sampling.seed", "Seed for repeatable sampling. Default: random.")
    ]
    beam_width: Annotated[
        int | None,
        Parameter(
            "beam.width",
            "Number of hypotheses of a beam search, which replaces sampling.",
            Range(1, "max_outputs"),
        ),
    ]
    length_penalty: Annotated[
        float | None,
        Parameter(
            "beam.length_penalty",
            "Exponent of the length that divides a hypothesis' log-probability.",
            Range(-10, 10),
            default=1,
            flags=(),
        ),
    ]
    early_stopping: Annotated[
        bool | None,
        Parameter(
            "beam.early_stopping",
            "End the beam search once as many hypotheses as its width are finished.",
            flags=(),
        ),
    ]
    json_schema: Annotated[
        Schema | None,
        Parameter(
            "constraint.json_schema",
            "JSON Schema that every output must match.",
            file=True,
            http=False,
        ),
    ]
    lenient_schema: Annotated[
        bool | None,
        Parameter(
            "constraint.lenient",
            "Ignore parts of the JSON Schema that cannot be enforced, and check outputs at their "
            "end.",
            http=False,
        ),
    ]
    json_object: Annotated[
        bool | None,
        Parameter("constraint.json_object", "Every output is a JSON object.", http=False),
    ]
    regex: Annotated[
        str | None,
        Parameter(
            "constraint.regex",
            "Regular expression that every output matches as a whole.",
            http=False,
        ),
    ]
    grammar: Annotated[
        str | None,
        Parameter(
            "constraint.grammar",
            "Grammar that every output must match, in llguidance's dialect of Lark.",
            file=True,
            http=False,
        ),
    ]
    choices: Annotated[
        Sequence[str] | None,
        Parameter(
            "constraint.choices.values",
            "Allowed texts; every output is one of them; repeatable.",
            flags=("--choice",),
            http=False,
        ),
    ]
    logprobs: Annotated[
        int | None,
        Parameter(
            "output.logprobs",
            "Number of top log-probabilities per output token.",
            Range(0, MAX_LOGPROBS),
        ),
    ]
    prompt_logprobs: Annotated[
        int | None,
        Parameter(
            "output.prompt_logprobs",
            "Number of top log-probabilities per prompt token.",
            Range(0, MAX_LOGPROBS),
            flags=(),
            http=False,
        ),
    ]
    token_ids: Annotated[
        bool | None,
        Parameter("output.token_ids", "Report token ids with the text.", flags=(), http=False),
    ]
    final_only: Annotated[
        bool | None,
        Parameter(
            "output.final_only",
            "Send each output whole once it is complete.",
            flags=(),
            http=False,
        ),
    ]
    keep_special_tokens: Annotated[
        bool | None,
        Parameter("output.keep_special_tokens", "Keep special tokens in the text.", flags=()),
    ]
    prompt_token_ids: Annotated[
        bool | None,
        Parameter(
            "output.prompt_token_ids", "Report the prompt's token ids.", flags=(), http=False
        ),
    ]


TYPES: dict[str, Any] = get_type_hints(GenerateOptions)
"""Type of each parameter, by name."""

PARAMETERS: dict[str, Parameter] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(GenerateOptions, include_extras=True).items()
}
"""All parameters, by name."""


NEUTRAL: GenerateOptions = {
    "temperature": 1,
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
}
"""Values without effect: a request with these does not depend on a model's defaults."""


@cache
def parameters_of(message: str) -> tuple[tuple[str, Parameter], ...]:
    """Return the name and declaration of each parameter in a message of GenerateRequest."""
    return tuple((name, p) for name, p in PARAMETERS.items() if p.message == message)


def set_values(message: Message, name: str) -> Iterator[tuple[str, Parameter, Any]]:
    """Yield name, declaration and value of each parameter that is set in a message.

    Fields without presence are always yielded, as their default may have been set explicitly.
    """
    fields = message.DESCRIPTOR.fields_by_name
    for parameter_name, parameter in parameters_of(name):
        field_name = parameter.field
        if not fields[field_name].has_presence or message.HasField(field_name):
            yield parameter_name, parameter, getattr(message, field_name)
