"""Values that a client returns."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FinishReason(StrEnum):
    """Why an output ended."""

    UNSPECIFIED = "unspecified"
    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"  # noqa: S105 - not a secret
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool: the tool's name, and its arguments as JSON."""

    id: str
    name: str
    arguments: str

    def parse(self) -> Any:  # noqa: ANN401 - any JSON
        """Return the decoded arguments, usually a dict.

        Raises:
            ValueError: The arguments are not JSON, as the output was unconstrained or truncated.
        """
        return json.loads(self.arguments)


@dataclass(frozen=True, slots=True)
class Image:
    """An image in a message of role "user": the data of a PNG, JPEG, WebP or GIF file, or a URL.

    Attributes:
        data: The file.
        url: A data URL, or an https URL that the router's --allow-image-urls matches.
        media_type: Media type of the data. Default: what the file itself says.
        detail: How closely to look: "auto", "low" or "high"; it has no effect.

    Raises:
        TypeError: It has neither data nor a URL, or both.
    """

    data: bytes = b""
    url: str = ""
    media_type: str = ""
    detail: str = ""

    def __post_init__(self) -> None:
        if bool(self.data) == bool(self.url):
            raise TypeError("an image has either data or a URL")


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool".
        content: The text, or its parts: texts and images.
        tool_calls: Tool calls of an assistant's message.
        tool_call_id: Id of the call that a tool's message answers.
        reasoning: Reasoning before the answer, in an assistant's message.
        name: Name of the tool or of the participant.
    """

    role: str
    content: str | Sequence[str | Image] = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    reasoning: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at a token's position."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural-log probability and the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one output.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Tokens of the prompt that were in the prefix cache.
        output_tokens: Generated tokens.
        reasoning_tokens: Generated tokens within reasoning.
        drafted_tokens: Tokens drafted by engines (speculative decoding).
        accepted_tokens: Drafted tokens that became part of the output.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Loading:
    """The model is being loaded; the request came as number `queue_position` of those that wait."""

    model: str
    queue_position: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is queued, at `queue_position` from 1, or it is running.

    `cached_tokens` is 0 for a queued request; `Usage` has the real number.
    """

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    queue_position: int = 0
    unenforced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next piece of an output's call `index`; the first one has id and name."""

    index: int
    arguments: str
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of output `index`. Text may lag behind the tokens."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Output `index` is complete."""

    index: int
    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token_id: int | None = None
    score: float | None = None
    schema_errors: tuple[str, ...] = ()


Event = Loading | Accepted | Delta | Finished


@dataclass(frozen=True, slots=True)
class Output:
    """One complete output."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token_id: int | None = None
    score: float | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    schema_errors: tuple[str, ...] = ()

    @property
    def message(self) -> Message:
        """The output as a message of the next prompt."""
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one request, with `outputs` ordered by index."""

    request_id: str
    model: str
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    unenforced: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text

    @property
    def texts(self) -> tuple[str, ...]:
        """Every output's text."""
        return tuple(output.text for output in self.outputs)

    @property
    def reasoning(self) -> str:
        """The first output's reasoning."""
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The first output's calls of tools."""
        return self.outputs[0].tool_calls

    @property
    def message(self) -> Message:
        """The first output as a message of the next prompt."""
        return self.outputs[0].message

    @property
    def usage(self) -> Usage:
        """Token counts of the prompt and of all outputs."""
        first = self.outputs[0].usage
        sampled = sum(output.usage.output_tokens for output in self.outputs)
        reasoned = sum(output.usage.reasoning_tokens for output in self.outputs)
        drafted = sum(output.usage.drafted_tokens for output in self.outputs)
        accepted = sum(output.usage.accepted_tokens for output in self.outputs)
        return Usage(first.prompt_tokens, first.cached_tokens, sampled, reasoned, drafted, accepted)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The result of `embed`.

    Attributes:
        request_id: The request's id.
        model: The model that embedded the texts.
        embeddings: The texts' embeddings in order, each an array of 32-bit floats, which
            `numpy.asarray` takes as it is.
        token_counts: Tokens of each text.
    """

    request_id: str
    model: str
    embeddings: tuple["array[float]", ...] = field(hash=False)
    token_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """The result of `score`.

    Attributes:
        request_id: The request's id.
        model: The model that scored the documents.
        scores: The documents' scores in order, as 32-bit floats.
        token_counts: Tokens of each document and its query.
    """

    request_id: str
    model: str
    scores: "array[float]" = field(hash=False)
    token_counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Classes:
    """The result of `classify`.

    Attributes:
        request_id: The request's id.
        model: The model that classified the texts.
        labels: Names of the classes.
        scores: The texts' scores in order, each an array of 32-bit floats, one for each class.
        token_counts: Tokens of each text.
    """

    request_id: str
    model: str
    labels: tuple[str, ...]
    scores: tuple["array[float]", ...] = field(hash=False)
    token_counts: tuple[int, ...]

    @property
    def best(self) -> tuple[str, ...]:
        """The name of each text's class with the highest score."""
        return tuple(self.labels[each.index(max(each))] for each in self.scores)


@dataclass(frozen=True, slots=True)
class Model:
    """A served model, its limits and its load. See protos' ModelCard.

    Attributes:
        default_sampling: The model's default parameters, named as options of `generate`.
        ranks: Total processes of the engines; 0 if unknown.
        base_model: Base model of a LoRA adapter; empty for other models.
        aliases: Other names of the model in requests.
        embedding_dimensions: Dimensions of its embeddings; 0: it does not embed texts.
        prompt_names: Names of the prompts that `embed` may put before texts.
        similarity: How its embeddings are compared, such as "cosine"; empty: unknown.
        state: "loaded", or if the router loads it on demand, also "unloaded", "loading",
            "unloading" or "failed".
        labels: Names of the classes that `classify` scores; one: `score` works too.
    """

    name: str
    max_model_len: int
    vocab_size: int
    engines: int
    block_size: int
    total_blocks: int
    free_blocks: int
    running: int
    waiting: int
    swapped: int
    cached_blocks: int
    shared_blocks: int
    wasted_slots: int
    total_swap_blocks: int
    used_swap_blocks: int
    warnings: tuple[str, ...] = ()
    default_sampling: Mapping[str, float] = field(default_factory=dict, hash=False)
    default_max_tokens: int | None = None
    kernels: tuple[str, ...] = ()
    ranks: int = 0
    base_model: str = ""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    aliases: tuple[str, ...] = ()
    embedding_dimensions: int = 0
    prompt_names: tuple[str, ...] = ()
    similarity: str = ""
    state: str = "loaded"
    labels: tuple[str, ...] = ()

    @property
    def used_blocks(self) -> int:
        """Number of KV-cache blocks that requests hold."""
        return self.total_blocks - self.free_blocks

    @property
    def waste(self) -> float:
        """Fraction of token slots in used blocks that are empty, 0 to 1."""
        slots = self.used_blocks * self.block_size
        return self.wasted_slots / slots if slots else 0.0

    @property
    def cache_use(self) -> float:
        """Fraction of KV-cache blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0
