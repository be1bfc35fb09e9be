"""Values that a client returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why an output ended."""

    UNSPECIFIED = "unspecified"
    EOS = "eos"
    LENGTH = "length"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"  # noqa: S105 - not a secret


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a chat: role "system", "user", "assistant" or "tool"."""

    role: str
    content: str


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
    """Tokens counted for one output; `cached_tokens` of the prompt were in the cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was admitted and is being computed."""

    request_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """The next piece of output `index`. Text may lag behind the tokens."""

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """Output `index` is complete."""

    index: int
    reason: FinishReason
    usage: Usage
    stop_string: str | None = None
    stop_token_id: int | None = None
    score: float | None = None


Event = Accepted | Delta | Finished


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


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of one request; `outputs` are in order of their index."""

    request_id: str
    model: str
    outputs: tuple[Output, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The first output's text."""
        return self.outputs[0].text

    @property
    def texts(self) -> tuple[str, ...]:
        """Every output's text."""
        return tuple(output.text for output in self.outputs)

    @property
    def usage(self) -> Usage:
        """The prompt's tokens, counted once, and all outputs' tokens."""
        first = self.outputs[0].usage
        sampled = sum(output.usage.output_tokens for output in self.outputs)
        return Usage(first.prompt_tokens, first.cached_tokens, sampled)


@dataclass(frozen=True, slots=True)
class Model:
    """A served model, its limits and its load. See ModelCard in the contract.

    Attributes:
        default_sampling: The model's own defaults, by the option of `generate`.
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
    compiling: bool = False
    kernels: tuple[str, ...] = ()

    @property
    def used_blocks(self) -> int:
        """KV-cache blocks that requests hold."""
        return self.total_blocks - self.free_blocks

    @property
    def waste(self) -> float:
        """The fraction of token slots in used blocks that are empty, 0 to 1."""
        slots = self.used_blocks * self.block_size
        return self.wasted_slots / slots if slots else 0.0

    @property
    def cache_use(self) -> float:
        """The fraction of KV-cache blocks in use, 0 to 1."""
        return 1 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0
