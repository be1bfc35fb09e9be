"""A step's changes to its sequences: at its launch, and once its tokens are known.

A step changes its sequences twice, so that the next step can be scheduled in between. At the
launch, `advance` counts the tokens as computed and adds placeholders for the samples. `update`
fills in the sampled tokens.
"""

from collections.abc import Collection
from operator import attrgetter

import numpy as np

from octavo.engine.scheduling.batch import Batch, Samples, ScheduledSequence
from octavo.engine.scheduling.drafting import rejected
from octavo.engine.scheduling.fork_beams import advance_search
from octavo.engine.scheduling.scheduler import Scheduler
from octavo.engine.scheduling.sequence import PLACEHOLDER, GroupState, Sequence, SequenceGroup
from octavo.engine.speculation.speculation import Speculation

_STATE, _FINISH_REASON = attrgetter("state"), attrgetter("finish_reason")


def advance(scheduler: Scheduler, batch: Batch, left_out: Collection[int] = ()) -> None:
    """Count a launched step's tokens as computed, and add placeholders for its samples.

    So the next step can be scheduled before the samples are known: the device runs steps in the
    order of their launches.

    Args:
        scheduler: The scheduler of its sequences.
        batch: The step.
        left_out: Ids of sequences whose mask was late. They get no token, so their last token
            is computed again, with the same K and V in the same slot.
    """
    size, sequences = scheduler.cache.block_size, batch.sequences
    starts, ends = batch.starts, batch.ends
    for i, draft in batch.drafts.items():
        ends[i] -= len(draft)  # `update` counts the right ones
    skipped = _ended(batch.groups, sequences)
    if left_out:
        skipped.update(i for i, s in enumerate(sequences) if s.id in left_out)
    for i, (sequence, end) in enumerate(zip(sequences, ends.tolist(), strict=True)):
        if i not in skipped:
            sequence.num_computed = end
    for i in np.flatnonzero(ends // size > starts // size).tolist():
        if i not in skipped:
            _publish_prefix(scheduler, sequences[i])
    for i, scheduled in enumerate(batch.rest, len(batch.plain)):
        scheduled.group.num_scored += len(scheduled.scored)  # late masks or not
        prefilled = scheduled.sequence.num_computed == scheduled.sequence.num_prompt
        if prefilled and i not in skipped:
            _fork_siblings(scheduler, scheduled)
    for sequence in batch.sampled(skipped):  # inline, as this runs for each token
        sequence.token_ids.append(PLACEHOLDER)
        sequence.num_placeholders += 1


def _fork_siblings(scheduler: Scheduler, lead: ScheduledSequence) -> None:
    """Share a lead's blocks with its siblings once the lead has computed the prompt."""
    for sibling in lead.group.live:
        if not scheduler.cache.holds(sibling.id):
            scheduler.cache.fork(lead.sequence.id, sibling.id, lead.end)
            sibling.num_computed = lead.end


def update(scheduler: Scheduler, batch: Batch, samples: Samples) -> None:
    """Fill in a step's sampled tokens, and finish the sequences that they complete.

    A finished sequence gets its finish reason, and its blocks are freed. Tokens of sequences
    that ended after the step was launched are removed from the samples.

    The order matters. Beams advance first, as a search that ends frees blocks. Tokens are
    filled in before any sequence finishes, since that frees its blocks, and blocks can be
    published only before. Drafts are rolled back last, once the right ones are known.
    """
    for group, logprobs in samples.prompt_logprobs:
        group.prompt_logprobs.extend(logprobs)
    _advance_searches(scheduler, batch, samples)
    dropped = _ended(samples.groups, samples.sequences) | rejected(samples)
    if dropped:
        samples.keep([i for i in range(len(samples)) if i not in dropped])
    token_ids, stopped = samples.token_ids, list[int]()
    for i in samples.drafts:  # the token before it was a right draft
        samples.sequences[i].append_placeholder()
        samples.sequences[i].num_computed += 1
    columns = zip(samples.groups, samples.sequences, token_ids, strict=True)
    for i, (group, sequence, token_id) in enumerate(columns):
        # With async scheduling, the next step is already launched and has appended its
        # placeholder, so the first of two is filled in.
        left = sequence.num_placeholders
        sequence.token_ids[-left] = token_id
        sequence.num_placeholders = left - 1
        if token_id in group.request.stopping:
            stopped.append(i)
    # A full block can be published only now, when all its token ids are known: its key is their
    # digest.
    for i in np.flatnonzero((samples.positions + 1) % scheduler.cache.block_size == 0).tolist():
        group, sequence = samples.groups[i], samples.sequences[i]
        running = group.state is GroupState.RUNNING and scheduler.cache.holds(sequence.id)
        if running and sequence.num_computed > samples.positions[i]:
            _publish_prefix(scheduler, sequence)
    lasts = np.flatnonzero(samples.positions >= samples.limits).tolist()
    samples.ends = sorted({*stopped, *lasts})
    for i in samples.ends:
        group, sequence = samples.groups[i], samples.sequences[i]
        reason = group.request.finish_reason(token_ids[i], sequence.num_known_output)
        assert reason is not None
        scheduler.finish(group, sequence, reason)
    if scheduler.speculation is not None:
        _end_drafts(scheduler, batch, scheduler.speculation)


def _end_drafts(scheduler: Scheduler, batch: Batch, speculation: Speculation) -> None:
    """Count the right drafted tokens; roll back the others."""
    for group, sequence, start, end, _, _, draft, _ in batch.rest:
        if not draft:
            continue
        # One token was sampled after the last right one; none if the output was aborted.
        accepted = max(0, sequence.num_known - start - 2)
        sequence.drafted_tokens += len(draft)
        sequence.accepted_tokens += accepted
        scheduler.counters["drafted_tokens"] += len(draft)
        scheduler.counters["accepted_tokens"] += accepted
        if sequence.drafting is not None:
            speculation.end_draft(sequence.drafting, len(draft), accepted)
        if sequence.finish_reason is not None or group.state is GroupState.FINISHED:
            continue  # its blocks are free
        if sequence.num_computed < end:
            scheduler.cache.roll_back(sequence.id, sequence.num_computed)


def _advance_searches(scheduler: Scheduler, batch: Batch, samples: Samples) -> None:
    """Advance the beam searches whose beams have all reached their last token."""
    continuations = samples.continuations
    for group in dict.fromkeys(s.group for s in batch.rest if s.group.beam):
        if group.state is GroupState.FINISHED:  # after the step was launched
            for beam in group.sequences:
                continuations.pop(beam.id, None)
        elif all(beam.id in continuations for beam in group.live) and not advance_search(
            group, continuations, scheduler.cache, scheduler.fork_ids
        ):
            scheduler.remove(group)
            samples.searches.append(group)


def _publish_prefix(scheduler: Scheduler, sequence: Sequence) -> None:
    known = min(sequence.num_computed, sequence.num_known)
    scheduler.cache.publish(sequence.id, sequence.token_ids, known)


def _ended(groups: list[SequenceGroup], sequences: list[Sequence]) -> set[int]:
    """Return the indices of sequences that have ended or whose group has ended."""
    if GroupState.FINISHED not in map(_STATE, groups) and all(
        reason is None for reason in set(map(_FINISH_REASON, sequences))
    ):
        return set()  # the common case, without checking each one
    return {
        i
        for i, (group, sequence) in enumerate(zip(groups, sequences, strict=True))
        if sequence.finish_reason is not None or group.state is GroupState.FINISHED
    }
