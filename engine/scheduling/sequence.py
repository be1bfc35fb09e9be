"""Sequences, and the groups of them that are scheduled as one."""

import time
from dataclasses import dataclass, field
from enum import Enum, auto

from octavo.common.priority import effective_arrival
from octavo.engine.scheduling.beam_search import BeamState
from octavo.engine.scheduling.request import FinishReason, Request

UNKNOWN = -1
"""In a token's place until the step that draws it has told."""


@dataclass(slots=True, eq=False)
class TokenLogprob:
    """A token's natural-log probability and the most likely ones at its place."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True, eq=False)
class Sequence:
    """One output in the making: the prompt's tokens, then its own.

    Attributes:
        id: unique in the engine; the KV cache's name for it.
        index: its place among the request's outputs, from 0.
        token_ids: prompt and output.
        num_prompt: how many of them are the prompt's.
        num_computed: how many of them, from the front, have K/V in the cache, or will
            once the steps that were launched are done.
        num_pending: how many, at the end, are `UNKNOWN`: being drawn.
        finish_reason: set once it is complete.
    """

    id: int
    index: int
    token_ids: list[int]
    num_prompt: int
    num_computed: int = 0
    num_pending: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Tokens of the output alone."""
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        """Tokens without K/V; 1 while decoding."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output that are not being drawn."""
        return len(self.token_ids) - self.num_pending

    @property
    def num_drawn(self) -> int:
        """Tokens of the output that are known."""
        return self.num_known - self.num_prompt

    def expect(self) -> None:
        """Gets one token longer, by one that is being drawn."""
        self.token_ids.append(UNKNOWN)
        self.num_pending += 1

    def take(self, token_id: int) -> None:
        """Learns the first of the tokens that are being drawn."""
        self.token_ids[-self.num_pending] = token_id
        self.num_pending -= 1

    def expect_nothing(self) -> None:
        """Gives up the tokens that are being drawn."""
        del self.token_ids[self.num_known :]
        self.num_pending = 0


class GroupState(Enum):
    """Where a sequence group is."""

    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


class Moment(Enum):
    """What happens to a sequence group once or rarely, by the names that traces show."""

    PREFILL = "prefill begins"
    DECODE = "first token"
    SWAPPED_OUT = "preempted: swapped out"
    DROPPED = "preempted: to be recomputed"
    SWAPPED_IN = "swapped in"


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """All outputs of one request: admitted, preempted and resumed as a gang.

    Attributes:
        request: what was asked.
        sequences: one for each output, by index, finished ones included; in a
            beam search the running beams, best first.
        state: where the group is.
        started: whether it was ever admitted.
        announced: whether the router was told so.
        decoding: whether a token was drawn for it here.
        cached_tokens: prompt tokens found in the prefix cache when first
            admitted.
        prompt_logprobs: of the prompt's second token on, as far as computed.
        beam: the search whose running beams the sequences are, or None.
        history: what happened to it when, by the monotonic clock.
    """

    request: Request
    sequences: list[Sequence]
    state: GroupState = GroupState.WAITING
    started: bool = False
    announced: bool = False
    decoding: bool = False
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    beam: BeamState | None = None
    history: list[tuple[Moment, float]] = field(default_factory=list)
    _tie: int = field(init=False)

    def __post_init__(self) -> None:
        self._tie = self.sequences[0].id  # beams come and go; the order must not change

    def note(self, moment: Moment) -> None:
        """Adds to the history."""
        self.history.append((moment, time.monotonic()))

    @property
    def order(self) -> tuple[float, int]:
        """The key that queues and preemption go by; lower is served sooner.

        See `effective_arrival`.
        """
        return effective_arrival(self.request.arrival, self.request.priority), self._tie

    @property
    def live(self) -> list[Sequence]:
        """Its unfinished sequences."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def num_slots(self) -> int:
        """Places it takes in the running batch: for a search, those it can come to need."""
        return self.beam.params.width if self.beam else len(self.live)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities were asked for and are not complete."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and len(self.prompt_logprobs) < len(self.request.prompt) - 1
        )
