"""What an engine is asked for: immutable, checked, free of protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

DEFAULT_SEED = 0


class FinishReason(IntEnum):
    """Why an output ended; the numbers are those of octavo.v1.FinishReason."""

    ABORTED = 0  # never sent: whoever aborted it asked for no more
    EOS = 1
    LENGTH = 2
    STOP_STRING = 3
    STOP_TOKEN = 4


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn; meanings and ranges as in octavo.v1.SamplingParams."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = DEFAULT_SEED
    n: int = 1
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken instead of drawing one."""
        return self.temperature == 0.0

    @property
    def truncated(self) -> bool:
        """Whether unlikely tokens are cut off before drawing."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def penalised(self) -> bool:
        """Whether tokens that were seen before change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search in place of sampling; meanings as in octavo.v1.BeamSearchParams."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(frozen=True, slots=True)
class Resumption:
    """Where an output goes on that another engine began.

    Attributes:
        token_ids: drawn for it so far, in order.
        finished: nothing more is drawn for it.
    """

    token_ids: tuple[int, ...]
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and what to do with it.

    Attributes:
        session: the router's session it came by.
        request_id: unique within the session.
        prompt: token ids, at least one.
        sampling: how tokens are drawn.
        max_tokens: tokens after which an output ends with LENGTH.
        min_tokens: tokens before which no stopping token is drawn.
        eos_token_ids: tokens that end an output with EOS; empty where the
            client asked to go on past them.
        stop_token_ids: tokens that end an output with STOP_TOKEN.
        priority: higher is sooner.
        cache_salt: prefixes are shared only with requests of the same salt.
        arrival: `time.monotonic()` seconds.
        deadline: `time.monotonic()` seconds, or None.
        beam: search in place of sampling, or None.
        resume: outputs that another engine began, by index.
        trace_context: the trace that it is part of, as W3C Trace Context has it.
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

    @property
    def stopping(self) -> frozenset[int]:
        """Tokens that end an output."""
        return self.eos_token_ids | self.stop_token_ids

    def finish_reason(self, last: int, length: int) -> FinishReason | None:
        """Why an output of `length` tokens is complete by its last one, if it is."""
        if last in self.stop_token_ids:
            return FinishReason.STOP_TOKEN
        if last in self.eos_token_ids:
            return FinishReason.EOS
        if length >= self.max_tokens:
            return FinishReason.LENGTH
        return None

    @property
    def num_outputs(self) -> int:
        """Outputs that come of it; as many sequences run at once."""
        return self.beam.width if self.beam else self.sampling.n
