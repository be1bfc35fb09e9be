"""Sequences, and the groups in which they are scheduled together."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from octavo.common.priority import effective_arrival
from octavo.engine.constraints.matcher import Matcher
from octavo.engine.scheduling.beam_search import BeamState
from octavo.engine.scheduling.request import FinishReason, Request
from octavo.engine.speculation.method import DraftState

PLACEHOLDER = -1
"""Token id of an unknown token that a launched step samples."""


@dataclass(slots=True, eq=False)
class TokenLogprob:
    """A token's natural-log probability, and the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True, eq=False)
class Sequence:
    """One output of a request: the prompt's tokens, then its own.

    Attributes:
        id: Id, unique in the engine and its KV cache.
        index: Index among the request's outputs, from 0.
        token_ids: Tokens of prompt and output.
        num_prompt: Number of prompt tokens.
        num_computed: Number of leading tokens whose K/V is in the cache, or will be after the
            launched steps.
        num_placeholders: Number of trailing `PLACEHOLDER` tokens.
        finish_reason: Reason of its end; None while it is incomplete.
        matcher: State of a constrained output in its grammar, with the allowed next tokens.
        drafting: State of its speculation; None before the first draft.
        drafted_tokens: Number of drafted tokens that no event has reported yet.
        accepted_tokens: Number of these that were right.
    """

    id: int
    index: int
    token_ids: list[int]
    num_prompt: int
    num_computed: int = 0
    num_placeholders: int = 0
    finish_reason: FinishReason | None = None
    matcher: Matcher | None = None
    drafting: DraftState | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    _copy: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    _copied: int = 0
    _copied_from: list[int] | None = None

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
        """Tokens of prompt and output without placeholders."""
        return len(self.token_ids) - self.num_placeholders

    @property
    def num_known_output(self) -> int:
        """Tokens of the output without placeholders."""
        return self.num_known - self.num_prompt

    @property
    def unmatched(self) -> list[int]:
        """Known tokens of the output that its matcher has not read yet."""
        read = 0 if self.matcher is None else self.matcher.length
        return self.token_ids[self.num_prompt + read : self.num_known]

    def known_tokens(self) -> NDArray[np.int64]:
        """Return the known tokens, `[num_known]` int64, from an array that grows with them."""
        if self._copied_from is not self.token_ids:  # a beam search replaces them
            self._copied, self._copied_from = 0, self.token_ids
        known = self.num_known
        if known > len(self._copy):
            self._copy = np.resize(self._copy, max(64, 2 * known))
        self._copy[self._copied : known] = self.token_ids[self._copied : known]
        self._copied = known
        return self._copy[:known]

    def take_draft_counts(self) -> tuple[int, int]:
        """Return the drafted and the accepted tokens since the last call."""
        counts = self.drafted_tokens, self.accepted_tokens
        self.drafted_tokens = self.accepted_tokens = 0
        return counts

    def append_placeholder(self) -> None:
        """Append a placeholder for a token that a launched step samples."""
        self.token_ids.append(PLACEHOLDER)
        self.num_placeholders += 1

    def drop_placeholders(self) -> None:
        """Remove all placeholders; their tokens will be dropped."""
        del self.token_ids[self.num_known :]
        self.num_placeholders = 0


class GroupState(Enum):
    """The queue of a sequence group; none while its constraint compiles or its prefix is read."""

    COMPILING = auto()
    READING = auto()
    WAITING = auto()
    RUNNING = auto()
    SWAPPED = auto()
    FINISHED = auto()


class GroupEvent(Enum):
    """Events of a sequence group, by their names in traces."""

    CONSTRAINED = "constraint compiled"
    PREFILL = "prefill begins"
    DECODE = "first token"
    SWAPPED_OUT = "preempted: swapped out"
    DROPPED = "preempted: to be recomputed"
    SWAPPED_IN = "swapped in"


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """All outputs of one request: admitted, preempted and resumed together.

    Attributes:
        request: The request.
        sequences: One sequence per output, by index, including finished ones; in a beam search the
            running beams, best first.
        state: The queue that the group is in.
        admitted: Whether it was ever admitted.
        start_reported: Whether its `Started` event was made.
        decoding: Whether this engine has sampled a token for it.
        cached_tokens: Prompt tokens found in the prefix cache when first
            admitted.
        prompt_logprobs: Known log-probabilities from the prompt's second token on.
        num_scored: Number of these that are known, or will be after the launched steps.
        beam: The beam search whose running beams the sequences are, or None.
        history: Its events with their times, in `time.monotonic()` seconds.
        decode_row: Its row in `KeptDecodes`; None if it has none.
        in_flight: Number of launched steps with it that stages still compute.
    """

    request: Request
    sequences: list[Sequence]
    state: GroupState = GroupState.WAITING
    admitted: bool = False
    start_reported: bool = False
    decoding: bool = False
    cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_scored: int = 0
    beam: BeamState | None = None
    history: list[tuple[GroupEvent, float]] = field(default_factory=list)
    decode_row: int | None = None
    in_flight: int = 0
    _tie: int = field(init=False)

    def __post_init__(self) -> None:
        self._tie = self.sequences[0].id  # beams come and go, but the order must not change

    def record(self, event: GroupEvent) -> None:
        """Append an event to the history."""
        self.history.append((event, time.monotonic()))

    @property
    def order(self) -> tuple[float, int]:
        """The sort key of queues and preemption; lower is served sooner.

        See `effective_arrival`.
        """
        return effective_arrival(self.request.arrival, self.request.priority), self._tie

    @property
    def live(self) -> list[Sequence]:
        """Its unfinished sequences."""
        return [sequence for sequence in self.sequences if sequence.finish_reason is None]

    @property
    def ready(self) -> bool:
        """Whether its next tokens can be sampled: its constraint's masks are ready."""
        if self.request.constraint is None:
            return True
        return all(s.matcher is not None and s.matcher.ready for s in self.live)

    @property
    def soon_ready(self) -> bool:
        """Whether its next tokens can probably be sampled once the model has run."""
        if self.request.constraint is None:
            return True
        return all(
            s.matcher is not None
            and (s.matcher.ready or s.matcher.awaited)
            and (s.matcher.quick or not s.num_placeholders)
            for s in self.live
        )

    @property
    def decoder(self) -> Sequence | None:
        """Its only sequence, if only that one's last token is left to compute."""
        if len(self.sequences) > 1 or self.beam is not None:
            return None
        sequence, request = self.sequences[0], self.request
        if (
            len(sequence.token_ids) != sequence.num_computed + 1
            or len(sequence.token_ids) >= sequence.num_prompt + request.max_tokens
            or request.constraint is not None
            or request.sampling.prompt_logprobs is not None
        ):
            return None
        return sequence

    @property
    def num_slots(self) -> int:
        """Sequences that it counts as in the batch; a beam search counts its full width."""
        return self.beam.params.width if self.beam else len(self.live)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of the prompt log-probabilities that the request wants are still missing."""
        return (
            self.request.sampling.prompt_logprobs is not None
            and self.num_scored < len(self.request.prompt) - 1
        )

    @property
    def awaits_output(self) -> bool:
        """Whether a launched step computes results that the group needs to continue."""
        placeholders = any(sequence.num_placeholders for sequence in self.sequences)
        return placeholders or self.num_scored > len(self.prompt_logprobs)


def new_group(request: Request, ids: Iterator[int]) -> SequenceGroup:
    """Return a request's group, with the tokens that another engine sampled for its outputs.

    Args:
        request: The request.
        ids: Yields ids for its sequences.
    """
    sequences = []
    for index in range(1 if request.beam else request.sampling.n):
        tokens, reason = list(request.prompt), None
        if (resumed := request.resume.get(index)) is not None:
            tokens += resumed.token_ids
            reason = FinishReason.ABORTED if resumed.finished else None
        sequences.append(
            Sequence(next(ids), index, tokens, len(request.prompt), finish_reason=reason)
        )
    beam = BeamState(request.beam) if request.beam else None
    return SequenceGroup(request, sequences, beam=beam)
