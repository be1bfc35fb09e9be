"""Requests as the engine uses them: immutable, validated, without protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

import numpy as np

from octavo.common.kv_cache.prefix_hash import ImageSpan, prefix_salt
from octavo.engine.constraints.constraint import Constraint
from octavo.engine.constraints.matcher import EndRule
from octavo.engine.scheduling.sampling_params import SamplingParams


class RequestAdapter(Protocol):
    """The parts of a request's adapter that scheduling uses."""

    @property
    def name(self) -> str:
        """The model name in requests."""

    @property
    def digest(self) -> str:
        """The digest of its contents."""

    @property
    def nbytes(self) -> int:
        """Its size on the device, in bytes."""


class FinishReason(IntEnum):
    """Why an output ended; values are those of octavo.v1.FinishReason."""

    ABORTED = 0  # never sent: an aborted output has no more events
    EOS = 1
    LENGTH = 2
    STOP_STRING = 3
    STOP_TOKEN = 4


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Parameters of beam search, as in octavo.v1.BeamSearchParams."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class Resumption:
    """An output that another engine has started.

    Attributes:
        token_ids: Tokens sampled for it so far, in order.
        finished: Whether nothing more is sampled for it.
    """

    token_ids: tuple[int, ...]
    finished: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image of a prompt.

    Attributes:
        span: The prompt's tokens that stand for it, and its digest.
        places: `[n]` int64, positions of those tokens whose embeddings it replaces, ascending.
        tensors: What the vision encoder takes, by name.
    """

    span: ImageSpan
    places: np.ndarray
    tensors: Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and its parameters.

    Attributes:
        session: Number of the router's session that sent it.
        request_id: Id, unique within the session.
        prompt: Token ids, at least one.
        sampling: Sampling parameters.
        max_tokens: Maximum tokens of an output, which then ends with LENGTH.
        min_tokens: Minimum tokens of an output; no stopping token is sampled before.
        eos_token_ids: Tokens that end an output with EOS; empty with `ignore_eos`, unless a
            constraint needs them.
        stop_token_ids: Tokens that end an output with STOP_TOKEN.
        priority: Priority; higher is sooner.
        cache_salt: Salt of prefixes; only requests with the same salt share them.
        arrival: Time of arrival, in `time.monotonic()` seconds.
        deadline: Time of its deadline, in `time.monotonic()` seconds, or None.
        beam: Beam search parameters; None for sampling.
        resume: Outputs that another engine began, by index.
        trace_context: Its trace, in W3C Trace Context's format.
        constraint: Constraint of all outputs, or None.
        ignore_eos: Whether outputs continue past end-of-sequence tokens. A constrained output still
            ends by them where nothing else can follow.
        adapter: LoRA adapter, or None.
        first_number: The session's number of output 0; the others follow. 0: no numbers.
        kv_source: Address of another engine that may have its blocks; empty: none is known.
        bad_words: Sequences of tokens that outputs must not contain.
        images: The prompt's images, in order. A token follows the last.
        rotary: `[3, len(prompt)]` int64, rotary positions of the prompt's tokens, if they are not
            their places; later tokens count on from the largest.
        takes_greatest: Whether the result is the token of the highest logit, without
            log-probabilities; computed once, as every step reads it.
        stopping: Tokens that end an output.
        plain: Whether its decodes may be plain: one output, without penalties, log-probabilities,
            bad words, a constraint, beams or rotary positions of its own.
    """

    session: int
    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    max_tokens: int
    arrival: float
    min_tokens: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    priority: int = 0
    cache_salt: str = ""
    deadline: float | None = None
    beam: BeamSearch | None = None
    resume: Mapping[int, Resumption] = field(default_factory=dict)
    trace_context: Mapping[str, str] = field(default_factory=dict)
    constraint: Constraint | None = None
    ignore_eos: bool = False
    adapter: RequestAdapter | None = None
    first_number: int = 0
    kv_source: str = ""
    bad_words: tuple[tuple[int, ...], ...] = ()
    images: tuple[PromptImage, ...] = ()
    rotary: np.ndarray | None = field(default=None, compare=False)
    takes_greatest: bool = field(init=False, repr=False, compare=False)
    stopping: frozenset[int] = field(init=False, repr=False, compare=False)
    plain: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        greatest = self.sampling.takes_greatest and not self.bad_words
        object.__setattr__(self, "takes_greatest", greatest)
        object.__setattr__(self, "stopping", self.eos_token_ids | self.stop_token_ids)
        object.__setattr__(self, "plain", self._plain())

    def _plain(self) -> bool:
        sampling = self.sampling
        return not (
            sampling.n > 1
            or sampling.penalised
            or sampling.logprobs is not None
            or sampling.prompt_logprobs is not None
            or bool(self.bad_words)
            or self.beam is not None
            or self.constraint is not None
            or self.rotary is not None
        )

    def number_of(self, index: int) -> int:
        """Return the session's number of an output; 0 if it has none."""
        return self.first_number + index if self.first_number else 0

    @property
    def end_rule(self) -> EndRule:
        """The rule for when a constrained output may end."""
        never = self.eos_token_ids if self.ignore_eos else frozenset[int]()
        return EndRule(self.min_tokens, self.stopping, never)

    @property
    def prefix_salt(self) -> str:
        """The salt of its blocks in the prefix cache: adapters and images never share blocks."""
        digest = "" if self.adapter is None else self.adapter.digest
        return prefix_salt(self.cache_salt, digest, [image.span for image in self.images])

    @property
    def rotary_shift(self) -> int:
        """Distance of rotary positions behind the prompt from the tokens' places."""
        return 0 if self.rotary is None else int(self.rotary.max()) + 1 - len(self.prompt)

    def finish_reason(self, last: int, length: int) -> FinishReason | None:
        """Return why an output of `length` tokens ends with its last one; None if it goes on."""
        if last in self.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if last in self.eos_token_ids:
            return FinishReason.EOS
        if length >= self.max_tokens:
            return FinishReason.LENGTH
        return None

    @property
    def num_outputs(self) -> int:
        """Number of outputs, and of sequences that run at once."""
        return self.beam.width if self.beam else self.sampling.n
