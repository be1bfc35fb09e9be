"""A step's work, `Batch`, and the tokens that it samples, `Samples`."""

import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from octavo.engine.kv_cache import Transfers
from octavo.engine.scheduling.image_encodes import ImageKey
from octavo.engine.scheduling.request import PromptImage, Request
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup, TokenLogprob

MAX_BEAM_SHARE = 0.5
"""Share of beams in a step's sequences above which the next step waits for their tokens.

Let a step take t on the device, the host h to schedule the next step, and b be the share of beams.
If steps wait, all sequences get a token every t + h; otherwise beams get one every 2 t, and the
others every t. Not waiting gives more tokens if b < 2 h / (t + h): a half if h is a third of t."""

Continuations = list[tuple[int, float]]
"""A beam's most likely next tokens with their log-probabilities."""


class ScheduledSequence(NamedTuple):
    """The tokens [start, end) of one sequence that a step computes; the last ones may be drafts.

    Attributes:
        group: The sequence's group.
        sequence: The sequence.
        start: The first token without K/V.
        end: One past the last token to compute.
        tables: The sequence's block table of each layer group, long enough for `end` tokens. They
            are the cache's own and change when the next step is scheduled.
        sampled: Sequences whose next token is sampled from the logits of token `end - 1`: none
            within a prefill, the sequence itself at its end, all siblings if they share the prompt.
        draft: Drafted tokens after the last known token. The logits of that token and of each
            drafted one are sampled, so `sampled` is the sequence itself.
        num_units: Number of units of the file that hold its first tokens.
    """

    group: SequenceGroup
    sequence: Sequence
    start: int
    end: int
    tables: list[list[int]]
    sampled: list[Sequence]
    draft: Tokens[int] = ()
    num_units: int = 0

    @property
    def scored(self) -> range:
        """Tokens whose logits give the prompt log-probability of the next token.

        It is empty once the step counts as computed (`Scheduler.advance`).
        """
        if not self.group.wants_prompt_logprobs:
            return range(0)
        first = max(self.start, self.group.num_scored)
        return range(first, min(self.end, self.sequence.num_prompt - 1))


@dataclass(slots=True)
class Samples:
    """The tokens that a step samples, in columns; plain decodes come first.

    Which tokens they are is known once the step is collected.

    Attributes:
        groups: Group of each token's sequence.
        sequences: Sequence that each token is for.
        positions: `[n]` int64, position of each token in its sequence.
        limits: `[n]` int64, maximum position of a token of each output.
        numbers: `[n]` uint64, the session's number of each output; 0 if it has none.
        sessions: `[n]` int64, session of each request.
        greedy: `[n]` bool, whether the token is the most likely allowed one.
        rows: `[n]` int64, index in the batch of the sequence computed for each token.
        drafts: Drafted tokens before a token, by the token's index.
        token_ids: The tokens.
        logprobs: Log-probabilities of tokens, by index, if requested.
        ends: Indices of the tokens that end their output, in ascending order.
        continuations: Most likely next tokens of each beam that has reached its last token, by
            sequence id.
        prompt_logprobs: Log-probabilities of prompts' tokens, a list per group.
        searches: The beam searches that the step ends.
    """

    groups: list[SequenceGroup] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    positions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    limits: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    numbers: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint64))
    sessions: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    greedy: np.ndarray = field(default_factory=lambda: np.empty(0, np.bool_))
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    drafts: dict[int, Tokens[int]] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    ends: list[int] = field(default_factory=list)
    continuations: dict[int, Continuations] = field(default_factory=dict)
    prompt_logprobs: list[tuple[SequenceGroup, list[TokenLogprob]]] = field(default_factory=list)
    searches: list[SequenceGroup] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def take_greatest(self) -> bool:
        """Whether all tokens are the most likely allowed ones."""
        return bool(self.greedy.all())

    @property
    def constrained(self) -> list[int]:
        """Indices of the tokens under a constraint."""
        return [i for i, s in enumerate(self.sequences) if s.matcher is not None]

    def keep(self, kept: list[int]) -> None:
        """Drop all tokens except some."""
        for column in ("groups", "sequences", "token_ids"):
            values = getattr(self, column)
            setattr(self, column, [values[i] for i in kept] if values else [])
        for column in ("positions", "limits", "numbers", "sessions", "greedy", "rows"):
            setattr(self, column, getattr(self, column)[kept])
        for column in ("drafts", "logprobs"):
            values = getattr(self, column)
            setattr(self, column, {new: values[i] for new, i in enumerate(kept) if i in values})


NO_SAMPLES = Samples()
"""No tokens, where none are added later."""


@dataclass(slots=True)
class Batch:
    """The work of one step.

    Only the scheduler distinguishes plain decodes from the rest. For all others a batch is columns
    of sequences, plain decodes first: `groups`, `sequences`, `starts`, `ends` and `tables`.

    Attributes:
        plain: The tokens of plain decodes: each one's last known token is computed.
        plain_tables: `[n, width]` int32 for each layer group, block tables of the plain decodes,
            padded with 0 to the width of the longest one.
        rest: The other sequences.
        transfers: Block copies to do before computing.
        images: Images to encode, as far as the time allows, for later steps.
        dropped_images: Encoded or begun images to drop before.
        created: Time at which scheduling began, in `time.perf_counter()` seconds.
    """

    plain: Samples = field(default_factory=lambda: NO_SAMPLES)
    plain_tables: list[np.ndarray] = field(default_factory=list)
    rest: list[ScheduledSequence] = field(default_factory=list)
    transfers: Transfers = field(default_factory=Transfers)
    images: dict[ImageKey, PromptImage] = field(default_factory=dict)
    dropped_images: list[ImageKey] = field(default_factory=list)
    created: float = field(default_factory=time.perf_counter)

    @property
    def groups(self) -> list[SequenceGroup]:
        """Group of each sequence."""
        return [*self.plain.groups, *(each.group for each in self.rest)]

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences whose tokens the step computes."""
        return [*self.plain.sequences, *(each.sequence for each in self.rest)]

    @property
    def starts(self) -> np.ndarray:
        """`[num_sequences]` int64, the first token to compute of each sequence."""
        return _joined(self.plain.positions - 1, [each.start for each in self.rest])

    @property
    def ends(self) -> np.ndarray:
        """`[num_sequences]` int64, one past the last token of each sequence, drafts included."""
        return _joined(self.plain.positions, [each.end for each in self.rest])

    @property
    def drafts(self) -> dict[int, Tokens[int]]:
        """Drafted tokens at the end of sequences, by index."""
        count = len(self.plain)
        return {i: each.draft for i, each in enumerate(self.rest, count) if each.draft}

    def table(self, group: int) -> np.ndarray:
        """`[num_sequences, width]` int32, the block tables of a layer group, padded with 0."""
        plain = self.plain_tables[group] if self.plain else np.empty((0, 0), np.int32)
        if not self.rest:
            return plain
        rest = [each.tables[group] for each in self.rest]
        count, width = plain.shape
        table = np.zeros((count + len(rest), max(width, *map(len, rest))), np.int32)
        table[:count, :width] = plain
        for row, blocks in zip(table[count:], rest, strict=True):
            row[: len(blocks)] = blocks
        return table

    def sampled(self, skipped: set[int]) -> list[Sequence]:
        """Return the sequences that get a token, except some indices and beams."""
        sampled = list(self.plain.sequences)
        if skipped:
            sampled = [s for i, s in enumerate(sampled) if i not in skipped]
        for i, each in enumerate(self.rest, len(self.plain)):
            if each.group.beam is None and i not in skipped:
                sampled += each.sampled
        return sampled

    def samples(self) -> Samples:
        """Return the tokens to sample, except beams'."""
        plain, count = self.plain, len(self.plain)
        rest: list[tuple[SequenceGroup, Sequence, int]] = []  # and its row
        drafts: dict[int, Tokens[int]] = {}
        for row, each in enumerate(self.rest, count):
            if each.group.beam is None:
                rest += [(each.group, sequence, row) for sequence in each.sampled]
                for length in range(1, len(each.draft) + 1):
                    drafts[count + len(rest)] = each.draft[:length]
                    rest.append((each.group, each.sequence, row))
        requests = [group.request for group, _, _ in rest]
        sequences = [sequence for _, sequence, _ in rest]
        positions = [s.num_tokens + len(drafts.get(i, ())) for i, s in enumerate(sequences, count)]
        columns = list(zip(requests, sequences, positions, strict=True))
        return Samples(
            [*plain.groups, *(group for group, _, _ in rest)],
            [*plain.sequences, *sequences],
            _joined(plain.positions, positions),
            _joined(plain.limits, [s.num_prompt + r.max_tokens - 1 for r, s, _ in columns]),
            _joined(plain.numbers, [r.number_of(s.index) for r, s, _ in columns]),
            _joined(plain.sessions, [r.session for r in requests]),
            _joined(plain.greedy, [_takes_greatest(*each) for each in columns]),
            _joined(plain.rows, [row for _, _, row in rest]),
            drafts,
        )

    @property
    def beams(self) -> list[tuple[int, ScheduledSequence]]:
        """Beams that reach their last token, with their indices."""
        rest = enumerate(self.rest, len(self.plain))
        return [(i, each) for i, each in rest if each.group.beam is not None and each.sampled]

    @property
    def scored(self) -> list[tuple[int, ScheduledSequence]]:
        """Sequences with prompt log-probabilities to compute, with their indices."""
        return [(i, each) for i, each in enumerate(self.rest, len(self.plain)) if each.scored]

    @property
    def spilled(self) -> tuple[int, ScheduledSequence] | None:
        """The sequence whose first tokens are in the file, with its index."""
        rest = enumerate(self.rest, len(self.plain))
        return next(((i, each) for i, each in rest if each.num_units), None)

    @property
    def num_sequences(self) -> int:
        """Number of sequences whose tokens the step computes."""
        return len(self.plain) + len(self.rest)

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        return len(self.plain) + sum(each.end - each.start for each in self.rest)

    @property
    def num_drafted(self) -> int:
        """Number of tokens to compute that are drafted."""
        return sum(len(each.draft) for each in self.rest)

    @property
    def can_overlap(self) -> bool:
        """Whether the next step is scheduled before this step's tokens are known.

        The number of accepted drafted tokens depends on these tokens, and so do beams. Penalties
        and constraints also depend on them, but only when sampling. Beams with unknown tokens skip
        the next step. If most sequences are such beams, a step without them would compute too
        little, so the next step waits for their tokens.
        """
        if any(each.draft for each in self.rest):
            return False
        beams = sum(each.group.beam is not None and bool(each.sampled) for each in self.rest)
        return beams <= MAX_BEAM_SHARE * self.num_sequences

    @property
    def constrained(self) -> list[SequenceGroup]:
        """Groups whose tokens are sampled under a constraint."""
        constrained = (
            each.group
            for each in self.rest
            if each.sampled and each.group.request.constraint is not None
        )
        return list(dict.fromkeys(constrained))

    @property
    def late(self) -> set[int]:
        """Ids of the sequences whose masks are not ready."""
        sequences = (each.sequence for each in self.rest)
        return {s.id for s in sequences if s.matcher is not None and not s.matcher.ready}

    def __bool__(self) -> bool:
        work = self.plain or self.rest or self.images or self.dropped_images
        return bool(work) or bool(self.transfers)


def _takes_greatest(request: Request, sequence: Sequence, position: int) -> bool:
    """Return whether a token is the most likely allowed one."""
    # Before `min_tokens`, stop tokens are masked, by the constraint's mask if there is one.
    long_enough = position - sequence.num_prompt >= request.min_tokens
    return request.takes_greatest and (long_enough or sequence.matcher is not None)


def _joined(plain: np.ndarray, rest: Tokens[int]) -> np.ndarray:
    """Return a column of the plain decodes, then the rest."""
    return np.concatenate([plain, np.array(rest, plain.dtype)]) if rest else plain
