"""What the scheduler tells the executor to do in one step, and what it gets back."""

from dataclasses import dataclass, field

from octavo.engine.kv_cache import Transfers
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup, TokenLogprob


@dataclass(frozen=True, slots=True)
class Slice:
    """The tokens [start, end) of one sequence, to compute in this step.

    Attributes:
        group: the sequence's group.
        sequence: whose tokens.
        start: the first token without K/V.
        end: one past the last token to compute.
        blocks: the sequence's block table, long enough for `end` tokens.
        samplers: sequences that draw their next token from the logits of
            token `end - 1`: none within a prefill, the sequence itself at its
            end, all siblings where they share the prompt.
    """

    group: SequenceGroup
    sequence: Sequence
    start: int
    end: int
    blocks: list[int]
    samplers: list[Sequence]

    @property
    def scored(self) -> range:
        """Its tokens whose logits give prompt log-probabilities, each of the next token."""
        if not self.group.wants_prompt_logprobs:
            return range(0)
        first = max(self.start, len(self.group.prompt_logprobs))
        return range(first, min(self.end, self.sequence.num_prompt - 1))


@dataclass(slots=True)
class Batch:
    """One step.

    Attributes:
        slices: what to compute, all at once.
        transfers: copies to do before that.
    """

    slices: list[Slice] = field(default_factory=list)
    transfers: Transfers = field(default_factory=Transfers)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return sum(part.end - part.start for part in self.slices)

    def __bool__(self) -> bool:
        return bool(self.slices) or bool(self.transfers)


@dataclass(frozen=True, slots=True)
class Draw:
    """A token drawn for a sequence.

    Attributes:
        group: the sequence's group.
        sequence: whose.
        token_id: which.
        logprob: where asked for.
    """

    group: SequenceGroup
    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None = None


Continuations = list[tuple[int, float]]
"""A beam's most likely next tokens with their log-probabilities."""


@dataclass(slots=True)
class StepResult:
    """What a step computed.

    Attributes:
        draws: the tokens drawn.
        continuations: of each beam that has come to its last token, by
            sequence id.
        prompt_logprobs: for slices that wanted them, by index in the batch.
    """

    draws: list[Draw]
    continuations: dict[int, Continuations] = field(default_factory=dict)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
