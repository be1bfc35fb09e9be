"""Drafted tokens of a batch: which sequences get them, and which tokens were right.

Speculative decoding (Leviathan et al., ICML 2023; Chen et al., 2023): a step computes a sequence's
last token and some drafted tokens after it, and samples a token from the logits of each. A sampled
token depends on the sequence's tokens and its position's random number, never on the batch. So a
drafted token is right if it equals the token sampled in its place: outputs are the same as without
drafts, whether greedy or random.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from itertools import chain
from typing import NamedTuple, Protocol

from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.scheduling.batch import Batch, Samples
from octavo.engine.scheduling.preemption import with_blocks
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup
from octavo.engine.speculation.method import NO_GUESS, Guess
from octavo.engine.speculation.speculation import Speculation

DRAFT_SHARE = 0.5
"""Maximum share of drafted tokens in a step, besides decodes, so that prefills progress."""

Drafts = dict[int, Tokens[int]]
"""Drafted tokens by sequence id."""


class Wanted(NamedTuple):
    """A sequence to draft tokens for.

    Attributes:
        group: The sequence's group.
        sequence: The sequence; all its tokens are known.
        most: Maximum number of tokens to draft, at least one.
    """

    group: SequenceGroup
    sequence: Sequence
    most: int


class DraftModel(Protocol):
    """A model that drafts tokens for many sequences at once."""

    def draft(self, wanted: list[Wanted]) -> list[list[int]]:
        """Return a draft for each sequence, maybe an empty one."""

    def forget(self, sequence_id: int) -> None:
        """Forget a sequence that ended, if known."""


def may_draft(group: SequenceGroup) -> bool:
    """Return whether tokens can be drafted for a group; not for beams, which replace each other."""
    return group.beam is None


def make_drafts(
    speculation: Speculation | None,
    groups: Iterable[SequenceGroup],
    cache: KVCacheManager,
    decodes: int,
    budget: int,
    *,
    model: DraftModel | None = None,
) -> Drafts:
    """Draft tokens for the decoding sequences of running groups.

    Args:
        speculation: The draft method and its policy; None: no drafts.
        groups: Running groups.
        cache: The KV cache of their blocks.
        decodes: Number of sequences that decode in this step.
        budget: Tokens that the step can compute besides them.
        model: A draft model that replaces the method of `speculation`.
    """
    wanted: list[Wanted] = []
    left = int(DRAFT_SHARE * budget)
    drafts: Drafts = {}
    if speculation is None or not decodes or not left or not speculation.begin_step(decodes):
        return drafts
    for group in groups:
        if not may_draft(group) or group.wants_prompt_logprobs:
            continue
        if len(group.sequences) > 1 and len(with_blocks(group, cache)) < len(group.live):
            continue  # the lead still computes the prompt
        for sequence in group.live:
            most = min(left, _room(group, sequence))
            if most < 1 or not _decodes(sequence):
                continue
            if group.request.constraint is not None:
                draft = _constrained_draft(sequence, most)
            else:
                guessed = guess(speculation, group, sequence, most)
                draft = guessed.token_ids
                if model is not None and guessed.most > 0:
                    wanted.append(Wanted(group, sequence, guessed.most))
                    left -= guessed.most
            if draft:
                speculation.begin_draft(len(draft))
                drafts[sequence.id] = draft
                left -= len(draft)
    if model is not None and wanted:
        drafted = zip(wanted, model.draft(wanted), strict=True)
        drafts |= {each.sequence.id: draft for each, draft in drafted if draft}
    return drafts


def _room(group: SequenceGroup, sequence: Sequence) -> int:
    """Return the maximum number of drafted tokens: one more is sampled after them."""
    return group.request.max_tokens - 1 - sequence.num_output


def guess(speculation: Speculation, group: SequenceGroup, sequence: Sequence, most: int) -> Guess:
    """Return the tokens that the method proposes for a sequence, and the number that may pay."""
    if sequence.drafting is None:
        sequence.drafting = speculation.begin(sequence.num_prompt, group.request.cache_salt)
    return speculation.guess(sequence.drafting, sequence.token_ids, most)


def guess_constrained(
    speculation: Speculation | None, group: SequenceGroup, sequence: Sequence
) -> Guess:
    """Return the tokens to draft for a constrained sequence whose tokens are known.

    Its matcher filters them when it computes the mask in another thread.

    Args:
        speculation: The draft method, after `begin_step` with this batch's size; None: no drafts.
        group: The sequence's group.
        sequence: The sequence.
    """
    if speculation is None or not may_draft(group) or sequence.num_placeholders:
        return NO_GUESS
    most = _room(group, sequence)
    return guess(speculation, group, sequence, most) if most > 0 else NO_GUESS


def _constrained_draft(sequence: Sequence, most: int) -> Tokens[int]:
    """Return a sequence's drafted tokens, if its matcher made them for its current tokens."""
    matcher = sequence.matcher
    if matcher is None or not matcher.ready or matcher.length != sequence.num_output:
        return ()
    return matcher.draft[:most]


def _decodes(sequence: Sequence) -> bool:
    """Return whether all but a sequence's last token are computed, and that one is known."""
    return (
        sequence.num_uncomputed == 1 and sequence.num_output > 0 and not sequence.num_placeholders
    )


def waits_to_draft(speculation: Speculation, batch: Batch) -> bool:
    """Return whether to draft tokens after those that a step will sample.

    Then the next step is scheduled only once these are known.
    """
    sampled = chain(
        batch.plain.sequences,
        *(scheduled.sampled for scheduled in batch.rest if may_draft(scheduled.group)),
    )
    return speculation.begin_step(batch.num_sequences) and any(
        speculation.wants(sequence.drafting) for sequence in sampled
    )


def rejected(samples: Samples) -> set[int]:
    """Return the indices of sampled tokens after a wrong drafted token or an output's end.

    They were computed from tokens that the output does not have. A drafted token is right if it
    equals the token sampled in its place.
    """
    token_ids = samples.token_ids
    wrong = set[int]()
    for i, draft in samples.drafts.items():
        right = token_ids[i - len(draft) : i] == list(draft)
        stopping = samples.groups[i].request.stopping
        if not right or samples.positions[i] > samples.limits[i] or stopping.intersection(draft):
            wrong.add(i)
    return wrong
