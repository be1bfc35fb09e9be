"""A step's input and output: `Batch` and `SamplerOutput`."""

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.engine.kv_cache import Transfers
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup, TokenLogprob
from octavo.engine.scheduling.steady import NO_DECODES, DecodedTokens, Decodes

MAX_BEAM_SHARE = 0.5
"""Share of a step's sequences, above which the next step waits for the tokens of beams.

Let a step take t on the device, the host h to schedule the next one, and beams be the share b. If
steps wait, all sequences get a token every t + h; else beams get one every 2 t, and the others one
every t. That is more tokens if b < 2 h / (t + h): a half where h is a third of t."""


class ScheduledSequence(NamedTuple):
    """The tokens [start, end) of one sequence, computed in one step; the last ones may be drafted.

    Attributes:
        group: the sequence's group.
        sequence: the sequence.
        start: the first token without K/V.
        end: one past the last token to compute.
        tables: the sequence's block table of each layer group, long enough for `end` tokens. They
            are the cache's own, and change once the next step is scheduled.
        sampled: sequences whose next token is sampled from the logits of token `end - 1`:
            none within a prefill, the sequence itself at its end, all siblings where they
            share the prompt.
        draft: drafted tokens at its end: what may follow the last known one. The logits of that
            token and of each drafted one are sampled, so `sampled` is the sequence itself.
    """

    group: SequenceGroup
    sequence: Sequence
    start: int
    end: int
    tables: list[list[int]]
    sampled: list[Sequence]
    draft: Tokens[int] = ()

    @property
    def scored(self) -> range:
        """Tokens whose logits give prompt log-probabilities, each of the token after it.

        Empty once the step is counted as computed (`Scheduler.advance`).
        """
        if not self.group.wants_prompt_logprobs:
            return range(0)
        first = max(self.start, self.group.num_scored)
        return range(first, min(self.end, self.sequence.num_prompt - 1))


@dataclass(slots=True)
class Batch:
    """The work of one step.

    Attributes:
        steady: the decodes of steady sequences; see `steady.py`.
        ruled: the other scheduled sequences.
        transfers: block copies to do before that.
        created: when scheduling it began, in `time.perf_counter()` seconds.
    """

    steady: Decodes = NO_DECODES
    ruled: list[ScheduledSequence] = field(default_factory=list)
    transfers: Transfers = field(default_factory=Transfers)
    created: float = field(default_factory=time.perf_counter)

    @property
    def sequences(self) -> list[ScheduledSequence]:
        """All scheduled sequences, in the order of the flat batch."""
        steady = self.steady
        tables = zip(*(table.tolist() for table in steady.tables), strict=True)
        columns = zip(steady.groups, steady.sequences, steady.starts.tolist(), tables, strict=True)
        return [
            ScheduledSequence(group, sequence, start, start + 1, list(blocks), [sequence])
            for group, sequence, start, blocks in columns
        ] + self.ruled

    @property
    def num_sequences(self) -> int:
        """How many sequences it computes tokens of."""
        return len(self.steady) + len(self.ruled)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return len(self.steady) + sum(each.end - each.start for each in self.ruled)

    @property
    def num_drafted(self) -> int:
        """Tokens to compute that are drafted."""
        return sum(len(scheduled.draft) for scheduled in self.ruled)

    @property
    def can_overlap(self) -> bool:
        """Whether the next step is scheduled before this step's tokens are known.

        How many tokens a draft yields depends on which tokens these are, and so do beams. Penalties
        and constraints depend on them too, but only to sample. Beams whose tokens are not known sit
        the next step out. If they are most of the sequences, a step without them would compute too
        little, so it waits for them.
        """
        if any(scheduled.draft for scheduled in self.ruled):
            return False
        beams = sum(s.group.beam is not None and bool(s.sampled) for s in self.ruled)
        return beams <= MAX_BEAM_SHARE * self.num_sequences

    @property
    def constrained(self) -> bool:
        """Whether a constraint says which tokens may be sampled."""
        return any(s.group.request.constraint is not None for s in self.ruled if s.sampled)

    def __bool__(self) -> bool:
        return bool(self.steady or self.ruled) or bool(self.transfers)


class SampledToken(NamedTuple):
    """A token sampled for a sequence.

    Attributes:
        group: the sequence's group.
        sequence: the sequence.
        token_id: the token.
        logprob: where asked for.
    """

    group: SequenceGroup
    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None = None


Continuations = list[tuple[int, float]]
"""A beam's most likely next tokens with their log-probabilities."""


@dataclass(slots=True)
class SamplerOutput:
    """The output of one step.

    Attributes:
        steady: the sampled tokens of `Batch.steady`, by columns.
        tokens: those of `Batch.ruled`.
        continuations: of each beam that has reached its last token, by sequence id.
        prompt_logprobs: of scheduled sequences that asked for them, by index in the batch.
        searches: the beam searches that it ends.
    """

    steady: DecodedTokens = field(default_factory=DecodedTokens)
    tokens: list[SampledToken] = field(default_factory=list)
    continuations: dict[int, Continuations] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    searches: list[SequenceGroup] = field(default_factory=list)
