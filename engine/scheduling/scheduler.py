"""Decides, before every step, which tokens of which sequences to compute.

Continuous batching (Orca, OSDI 2022) with one token budget for decodes and
chunks of prefills alike (Sarathi-Serve, OSDI 2024), over a paged KV cache with
preemption of whole sequence groups (PagedAttention, SOSP 2023, section 4.5).
"""

import itertools
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from octavo.engine.kv_cache import KVCacheManager, OutOfBlocksError, Span
from octavo.engine.scheduling.batch import Batch, Continuations, Draw, Slice, StepResult
from octavo.engine.scheduling.beam_search import Candidate
from octavo.engine.scheduling.request import FinishReason
from octavo.engine.scheduling.sequence import GroupState, Moment, Sequence, SequenceGroup
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy

MAX_SCORED_TOKENS = 1024
"""Prompt tokens with log-probabilities in a step, all requests together. Each takes a row of
logits, of the vocabulary's size: so this bounds a step's memory, and its time on a CPU."""
WATERMARK = 0.01
"""Share of the blocks kept free when a group is admitted or swapped in, so that
the next few decodes do not at once preempt it again."""


@dataclass(slots=True)
class Counters:
    """Events since the start, for metrics and tests."""

    preemptions_swap: int = 0
    preemptions_recompute: int = 0
    swap_space_full: int = 0
    swap_ins: int = 0


class Scheduler:
    """Three queues - waiting, running, swapped - and the rules between them.

    Groups are kept in the order of `SequenceGroup.order`; a step serves running
    groups first, then brings swapped ones back, then admits waiting ones. When
    blocks run out, the running group that is last in order is preempted whole.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        preemption: PreemptionPolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_scored_tokens: int = MAX_SCORED_TOKENS,
    ) -> None:
        self.cache = cache
        self.preemption = preemption
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_scored_tokens = max_scored_tokens
        self._scored_left = max_scored_tokens  # of the step that is being made
        self.counters = Counters()
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self._fork_ids = itertools.count(-1, -1)  # never the ids of sequences that were submitted
        self._watermark = int(WATERMARK * cache.device.num_blocks)

    def submit(self, group: SequenceGroup) -> None:
        """Queues a new group."""
        _insert(self.waiting, group)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.running or self.swapped or self.waiting)

    def groups(self) -> Iterator[SequenceGroup]:
        """Every group that is not finished."""
        yield from self.running
        yield from self.swapped
        yield from self.waiting

    # One step.

    def schedule(self) -> Batch:
        """Chooses the next step's work and gives it blocks."""
        batch = Batch()
        self._scored_left = self.max_scored_tokens
        preempted = self._serve_running(batch)
        if not preempted:
            self._resume_swapped(batch)
            if not self.swapped:
                self._admit_waiting(batch)
        batch.transfers = self.cache.take_transfers()
        return batch

    def book(self, batch: Batch) -> None:
        """Takes a step that was launched as done, but for what it draws.

        So the next one can be scheduled before that is known. Whatever touches blocks does
        so in the order in which it was launched.
        """
        for part in batch.slices:
            part.sequence.num_computed = part.end
            self._publish(part.sequence)
            self._fork_siblings(part)
            if part.group.beam is None:
                for sequence in part.samplers:
                    sequence.expect()

    def update(self, batch: Batch, result: StepResult) -> list[Draw]:
        """Takes what a step that was booked has drawn.

        A sequence that is complete by its new token has its finish reason
        afterwards, and no blocks.

        Returns:
            The draws, without those for sequences that have ended since the step was launched.
        """
        for i, found in result.prompt_logprobs.items():
            batch.slices[i].group.prompt_logprobs.extend(found)
        for group in _searching(batch):
            if all(sequence.id in result.continuations for sequence in group.live):
                self._advance(group, result.continuations)
        taken = []
        for draw in result.draws:
            group, sequence = draw.group, draw.sequence
            if sequence.finish_reason is not None or group.state is GroupState.FINISHED:
                continue
            taken.append(draw)
            sequence.take(draw.token_id)
            reason = group.request.finish_reason(draw.token_id, sequence.num_drawn)
            if reason is not None:
                self.finish(group, sequence, reason)
            elif sequence.num_computed >= sequence.num_known:  # the next step is booked already
                self._publish_late(group, sequence)
        return taken

    def _publish(self, sequence: Sequence) -> None:
        known = min(sequence.num_computed, sequence.num_known)
        self.cache.publish(sequence.id, sequence.token_ids, known)

    def _publish_late(self, group: SequenceGroup, sequence: Sequence) -> None:
        """Publishes a block whose last token was not known when it was computed."""
        if group.state is GroupState.RUNNING and self.cache.holds(sequence.id):
            self._publish(sequence)

    # Ends.

    def finish(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        """Completes one output, frees what it holds, and the group with its last."""
        sequence.finish_reason = reason
        sequence.expect_nothing()
        if self.cache.holds(sequence.id):
            self.cache.free(sequence.id)
        if not group.live:
            self.remove(group)
        elif group.state is not GroupState.WAITING and not self._ready(group):
            self._leave_queue(group)  # the lead ended before its siblings could share the prompt
            group.state = GroupState.WAITING
            _insert(self.waiting, group)

    def remove(self, group: SequenceGroup) -> None:
        """Forgets a group, wherever it is, and frees all that it holds."""
        for sequence in group.sequences:
            sequence.expect_nothing()
            if self.cache.holds(sequence.id):
                self.cache.free(sequence.id)
        self._leave_queue(group)
        group.state = GroupState.FINISHED

    def _leave_queue(self, group: SequenceGroup) -> None:
        queues = {
            GroupState.WAITING: self.waiting,
            GroupState.RUNNING: self.running,
            GroupState.SWAPPED: self.swapped,
        }
        if group.state in queues:
            queues[group.state].remove(group)

    # Beam search.

    def _advance(self, group: SequenceGroup, continuations: dict[int, Continuations]) -> None:
        """Takes a search one token on: forks, keeps and frees beams by what they lead to."""
        assert group.beam is not None
        beams, request = group.sequences, group.request
        chosen = group.beam.advance(
            [beam.token_ids[beam.num_prompt :] for beam in beams],
            [continuations[beam.id] for beam in beams],
            stopping=request.stopping,
            max_tokens=request.max_tokens,
        )
        if not chosen:
            self.remove(group)
            return
        tails = [beams[candidate.beam].token_ids for candidate in chosen]
        tails = [[*tail, c.token_id] for tail, c in zip(tails, chosen, strict=True)]
        group.sequences = [
            self._continue(beams[c.beam], chosen[:i], c) for i, c in enumerate(chosen)
        ]
        for sequence, tokens in zip(group.sequences, tails, strict=True):
            sequence.token_ids = tokens
        for beam in beams:
            if beam not in group.sequences:
                self.cache.free(beam.id)

    def _continue(self, beam: Sequence, before: list[Candidate], candidate: Candidate) -> Sequence:
        """The beam itself for the first candidate that goes on from it, a fork for others."""
        if all(earlier.beam != candidate.beam for earlier in before):
            return beam
        child = replace(beam, id=next(self._fork_ids))
        self.cache.fork(beam.id, child.id, beam.num_computed)
        return child

    # Running groups.

    def _serve_running(self, batch: Batch) -> bool:
        """Gives every running group its next tokens; preempts where blocks lack.

        Decodes always fit the budget, so it is the prefills that share what
        they leave. Blocks are given in order, and taken from the end: a group
        is never preempted after it was put into this step's batch.
        """
        wanted = [self._wanted(group) for group in self.running]
        decodes = sum(count == 1 for counts in wanted for _, count in counts)
        budget = self.max_num_batched_tokens - decodes
        preempted = False
        position = 0
        while position < len(self.running):
            group = self.running[position]
            spans, used = _next_spans(wanted[position], budget)
            try:
                self.cache.extend(spans)
            except OutOfBlocksError:
                self._preempt(self.running[-1])
                preempted = True
                continue
            budget -= used
            self._add(batch, group, spans)
            position += 1
        return preempted

    def _wanted(self, group: SequenceGroup) -> list[tuple[Sequence, int]]:
        """How many tokens each of a group's sequences could compute now; 1 is a decode.

        Where a prompt is scored, only as many as the step can still score; maybe none.

        Beams that catch up after preemption stop before their last tokens,
        which are computed together: a search goes on only as a whole.
        """
        ends = self._prefill_ends(group)
        catching_up = (
            group.beam is not None
            and 1 < len(ends) == len(group.live)
            and any(sequence.num_uncomputed > 1 for sequence, _ in ends)
        )
        return [(s, self._scorable(group, s, end - int(catching_up))) for s, end in ends]

    def _scorable(self, group: SequenceGroup, sequence: Sequence, end: int) -> int:
        """Returns how many tokens up to `end` can be computed, and takes those scored off the step.

        Tokens that were scored before a preemption are not scored again.
        """
        start = sequence.num_computed
        if group.wants_prompt_logprobs:
            first = max(start, len(group.prompt_logprobs))
            last = min(end, sequence.num_prompt - 1)
            scored = min(max(last - first, 0), self._scored_left)
            if scored < last - first:
                end = first + scored
            self._scored_left -= scored
        return end - start

    def _ready(self, group: SequenceGroup) -> list[Sequence]:
        """Live sequences that have blocks; siblings wait for the lead's prefill."""
        return [s for s in group.live if self.cache.holds(s.id)]

    def _prefill_ends(self, group: SequenceGroup) -> list[tuple[Sequence, int]]:
        """Where the prefill of each that is ready ends: the prompt's end, while siblings wait.

        The last token of all that it may have is never computed: nothing follows it.
        """
        ready = self._ready(group)
        if len(ready) < len(group.live):
            return [(s, s.num_prompt) for s in ready]
        others = group.request.max_tokens - 1
        return [(s, min(s.num_tokens, s.num_prompt + others)) for s in ready]

    def _add(self, batch: Batch, group: SequenceGroup, spans: list[Span]) -> None:
        by_id = {sequence.id: sequence for sequence in group.sequences}
        apart = [s for s in group.live if not self.cache.holds(s.id)]
        for id_, start, end in spans:
            sequence = by_id[id_]
            sharing = [sequence, *apart]
            samplers = [s for s in sharing if s.num_tokens == end]
            table = list(self.cache.table(id_))
            batch.slices.append(Slice(group, sequence, start, end, table, samplers))

    def _fork_siblings(self, part: Slice) -> None:
        """Once the lead has computed the prompt, its siblings share its blocks."""
        if part.end != part.sequence.num_prompt:
            return
        for sibling in part.group.live:
            if not self.cache.holds(sibling.id):
                self.cache.fork(part.sequence.id, sibling.id, part.end)
                sibling.num_computed = part.end

    # Preemption.

    def _preempt(self, group: SequenceGroup) -> None:
        """Takes all blocks from a running group, to swap space or altogether."""
        self.running.remove(group)
        ready = self._ready(group)
        for sequence in ready:
            self.cache.trim(sequence.id, sequence.num_computed)
        ids = [sequence.id for sequence in ready]
        blocks = self.cache.blocks_to_swap(ids)
        tokens = sum(sequence.num_computed for sequence in ready)
        if blocks and self.preemption.prefers_swap(blocks=blocks, tokens=tokens):
            try:
                self.cache.swap_out(ids)
            except OutOfBlocksError:
                self.counters.swap_space_full += 1
            else:
                self.counters.preemptions_swap += 1
                group.note(Moment.SWAPPED_OUT)
                group.state = GroupState.SWAPPED
                _insert(self.swapped, group)
                return
        self.counters.preemptions_recompute += 1
        group.note(Moment.DROPPED)
        for sequence in ready:
            self.cache.free(sequence.id)
            sequence.num_computed = 0
        group.state = GroupState.WAITING
        _insert(self.waiting, group)

    # Swapped and waiting groups.

    def _room(self, batch: Batch) -> tuple[int, int]:
        """Sequences and tokens that the batch can still take."""
        seqs = self.max_num_seqs - sum(g.num_slots for g in self.running)
        return seqs, self.max_num_batched_tokens - batch.num_tokens

    def _fits(self, blocks: int, slack: int) -> bool:
        """Whether a group may take `blocks` blocks now.

        Beside others it must leave `slack` for its own next tokens and the
        watermark; alone it may take all.
        """
        if self.running:
            blocks += slack + self._watermark
        return blocks <= self.cache.device.num_available

    def _resume_swapped(self, batch: Batch) -> None:
        while self.swapped:
            group = self.swapped[0]
            ends = self._prefill_ends(group)
            ids = [sequence.id for sequence, _ in ends]
            seqs, tokens = self._room(batch)
            growth = sum(
                self.cache.blocks_for(end) - self.cache.blocks_for(s.num_computed)
                for s, end in ends
            )
            blocks = self.cache.blocks_to_swap(ids) + growth
            if group.num_slots > seqs or tokens < len(ids) or not self._fits(blocks, len(ids)):
                return
            del self.swapped[0]
            self.cache.swap_in(ids)
            self.counters.swap_ins += 1
            group.note(Moment.SWAPPED_IN)
            self._run(batch, group, tokens)

    def _admit_waiting(self, batch: Batch) -> None:
        while self.waiting:
            group = self.waiting[0]
            lead, *siblings = group.live
            seqs, tokens = self._room(batch)
            reuse = group.request.sampling.prompt_logprobs is None
            salt = group.request.cache_salt
            front = lead.token_ids[: lead.num_prompt] if siblings else lead.token_ids
            blocks = self.cache.blocks_to_admit(front, reuse=reuse, salt=salt)
            own = sum(1 + self.cache.blocks_for(s.num_output) for s in siblings)
            if group.num_slots > seqs or tokens < 1 or not self._fits(blocks, 1 + own):
                return
            del self.waiting[0]
            lead.num_computed = self.cache.admit(lead.id, front, reuse=reuse, salt=salt)
            if not group.started:
                group.started = True
                group.cached_tokens = min(lead.num_computed, lead.num_prompt)
            self._run(batch, group, tokens)

    def _run(self, batch: Batch, group: SequenceGroup, budget: int) -> None:
        """Puts a group that just got blocks into the running queue and the batch."""
        group.state = GroupState.RUNNING
        ends = self._prefill_ends(group)
        self.cache.extend(Span(s.id, s.num_computed, end) for s, end in ends)
        wanted = self._wanted(group)
        decodes = sum(count == 1 for _, count in wanted)
        spans, _ = _next_spans(wanted, budget - decodes)
        _insert(self.running, group)
        self._add(batch, group, spans)


def _next_spans(wanted: list[tuple[Sequence, int]], budget: int) -> tuple[list[Span], int]:
    """What to compute of a group, and how much of the prefill budget that takes."""
    spans, used = [], 0
    for sequence, count in wanted:
        taken = count if count == 1 else min(count, budget - used)
        used += taken if count > 1 else 0
        if taken > 0:
            start = sequence.num_computed
            spans.append(Span(sequence.id, start, start + taken))
    return spans, used


def _insert(queue: list[SequenceGroup], group: SequenceGroup) -> None:
    insort(queue, group, key=attrgetter("order"))


def _searching(batch: Batch) -> list[SequenceGroup]:
    """The batch's groups that do beam search, once each."""
    return list(dict.fromkeys(part.group for part in batch.slices if part.group.beam))
