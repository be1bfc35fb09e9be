"""Chooses before every step which tokens of which sequences to compute.

Continuous batching (Orca, OSDI 2022) with one token budget for decodes and
chunks of prefills alike (Sarathi-Serve, OSDI 2024), over a paged KV cache with
preemption of whole sequence groups (PagedAttention, SOSP 2023, section 4.5).
"""

import itertools
import math
from bisect import insort
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import attrgetter

from octavo.engine.kv_cache import FileTakenError, KVCacheManager, OutOfBlocksError, Span
from octavo.engine.scheduling.adapter_budget import adapters_fit
from octavo.engine.scheduling.background import Background
from octavo.engine.scheduling.batch import Batch, ScheduledSequence
from octavo.engine.scheduling.chunks import Counts, most_blocks, prefill_ends
from octavo.engine.scheduling.drafting import DraftModel, Drafts, make_drafts, waits_to_draft
from octavo.engine.scheduling.image_encodes import ImageEncodes
from octavo.engine.scheduling.in_flight import next_groups
from octavo.engine.scheduling.plain_decodes import KeptDecodes
from octavo.engine.scheduling.preemption import (
    choose_victim,
    preempt,
    waits_to_spill,
    with_blocks,
)
from octavo.engine.scheduling.request import FinishReason
from octavo.engine.scheduling.sequence import GroupEvent, GroupState, Sequence, SequenceGroup
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy
from octavo.engine.speculation.speculation import Speculation

PREFILL_SHARE = 0.5
"""Minimum share of prefill tokens in a step that measures the speed of prefill."""
MAX_SCORED_TOKENS = 1024
"""Maximum number of prompt tokens with log-probabilities in a step, over all requests. Each takes a
row of logits as wide as the vocabulary, so this bounds a step's memory, and its time on a CPU."""
WATERMARK = 0.01
"""Share of the blocks that stays free when a group is admitted or swapped in, so that the next few
decodes do not preempt it at once."""


COUNTED = (
    *("preemptions_swap", "preemptions_recompute"),  # groups swapped out, or to be recomputed
    *("swap_space_full", "swap_ins"),  # groups that swap space had no room for, or swapped in
    *("drafted_tokens", "accepted_tokens"),  # drafted tokens verified, and those that were right
)
ORDER = attrgetter("order")
_BEGUN = {GroupState.RUNNING, GroupState.SWAPPED}


class Scheduler:
    """Keeps the queues of sequence groups, and chooses each step's tokens.

    The queues are waiting, running and swapped, each sorted by `SequenceGroup.order`. A step serves
    running groups first, then swaps groups in, then admits waiting ones. When blocks
    run out, `preemption` chooses the running group that gives up its blocks.

    Attributes:
        counters: Numbers since the start, by the names in `COUNTED`.
        max_prefill_seconds: Maximum time for which a step computes prompts beside decodes.
        stages: Number of steps in flight; each step gets its share of the running groups.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        policy: PreemptionPolicy,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_scored_tokens: int = MAX_SCORED_TOKENS,
        max_prefill_seconds: float = math.inf,
        adapter_limit: int | None = None,
        speculation: Speculation | None = None,
        draft_model: DraftModel | None = None,
        stages: int = 1,
        images: ImageEncodes | None = None,
    ) -> None:
        self.cache = cache
        self.speculation = speculation
        self.draft_model = draft_model
        self.images = images or ImageEncodes(0, 0)
        self.counters = Counter(dict.fromkeys(COUNTED, 0))
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.fork_ids = itertools.count(-1, -1)  # submitted sequences count up from 0
        self._decodes = KeptDecodes(layers.block_size for layers in cache.groups)
        self.policy = policy
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_scored_tokens = max_scored_tokens
        self.max_prefill_seconds = max_prefill_seconds
        self.stages = stages
        self.adapter_limit = adapter_limit
        self._step_tokens = max_num_batched_tokens  # limit of the step that is being scheduled
        self._scored_left = max_scored_tokens  # in the step that is being scheduled
        self._watermark = int(WATERMARK * cache.device.num_blocks)
        self._min_prefill = max(cache.block_size, self.images.longest_whole)
        self._background = Background(policy, self._min_prefill)

    def submit(self, group: SequenceGroup) -> None:
        """Queue a new group."""
        self._background.add(group)
        insort(self.waiting, group, key=ORDER)

    @property
    def idle(self) -> bool:
        """Whether no group is left, and no image that one began to encode."""
        return not (self.running or self.swapped or self.waiting or self.images.begun)

    @property
    def can_recompute(self) -> bool:
        """Whether a token may be computed twice; not with states, which would count it twice."""
        return not any(layers.state_blocks for layers in self.cache.groups)

    @property
    def waits_for_masks(self) -> bool:
        """Return whether a group cannot be scheduled until a mask of its constraint is ready."""
        return not all(group.ready for group in self.groups())

    def groups(self) -> Iterator[SequenceGroup]:
        """Return an iterator over the groups that are not finished."""
        return itertools.chain(self.running, self.swapped, self.waiting)

    def finish(self, group: SequenceGroup, sequence: Sequence, reason: FinishReason) -> None:
        """End one output and free its blocks; the last output ends the group."""
        sequence.finish_reason = reason
        sequence.drop_placeholders()
        if self.speculation is not None and sequence.drafting is not None:
            self.speculation.end(sequence.drafting, sequence.token_ids)
            sequence.drafting = None
        self._forget_draft(sequence)
        if self.cache.holds(sequence.id):
            self.cache.free(sequence.id)
        if not group.live:
            self.remove(group)
        elif group.state in _BEGUN and not with_blocks(group, self.cache):
            self._leave_queue(group)  # the lead ended before its siblings shared the prompt
            group.state = GroupState.WAITING
            insort(self.waiting, group, key=ORDER)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group from its queue, and free all its blocks."""
        self._decodes.remove(group)
        self._background.groups.discard(group)
        for sequence in group.sequences:
            sequence.drop_placeholders()
            self._forget_draft(sequence)
            if self.cache.holds(sequence.id):
                self.cache.free(sequence.id)
        self._leave_queue(group)
        group.state = GroupState.FINISHED

    def _forget_draft(self, sequence: Sequence) -> None:
        if self.draft_model is not None:
            self.draft_model.forget(sequence.id)

    def _leave_queue(self, group: SequenceGroup) -> None:
        queues = {
            GroupState.WAITING: self.waiting,
            GroupState.RUNNING: self.running,
            GroupState.SWAPPED: self.swapped,
        }
        if group.state in queues:
            queues[group.state].remove(group)

    def schedule(self) -> Batch:
        """Choose what the next step computes, and allocate the blocks for it."""
        batch = Batch()
        self.images.begin_step(group.request for group in self.groups())
        self._scored_left = self.max_scored_tokens
        # Running groups come first, then swapped ones, then new ones, so each group keeps its place
        # (the paper's section 4.5 admits none until all preempted sequences have completed). A
        # group admitted in a step that preempted would take the blocks just freed.
        groups = len(self.running) + len(self.swapped) + len(self.waiting)
        self._background.begin_step(self.running, groups - len(self._background.groups))
        preempted = self._schedule_running(batch)
        if not preempted:
            self._swap_in(batch)
            if self._background.groups.issuperset(self.swapped):
                self._admit_waiting(batch)
        batch.transfers = self.cache.take_transfers()
        batch.images, batch.dropped_images = self.images.chosen, self.images.end_step()
        return batch

    def observe_step(
        self, batch: Batch, seconds: float, copies: Iterable[tuple[int, float]] = ()
    ) -> None:
        """Record a step's duration for the policies that depend on it.

        Args:
            batch: The step.
            seconds: Its duration.
            copies: Numbers of blocks swapped since the last call, with their durations.
        """
        for blocks, copy_seconds in copies:
            self.policy.observe_transfer(blocks, copy_seconds)
        slowed = batch.transfers.swap_out or batch.transfers.swap_in or batch.images
        if slowed:
            return
        prefill = batch.num_tokens - batch.num_drafted - batch.num_sequences
        if prefill > PREFILL_SHARE * batch.num_tokens:
            self.policy.observe_prefill(batch.num_tokens, seconds)
        elif not prefill and batch.num_sequences:
            self._background.observe_decodes(batch.num_tokens, seconds)
            if self.speculation is not None:
                self.speculation.observe_step(batch.num_tokens, seconds)

    def can_overlap(self, batch: Batch) -> bool:
        """Return whether the next step can be scheduled before the tokens of a step are known.

        It cannot if drafted tokens would follow them, or if a mask may be late and its token cannot
        be recomputed.
        """
        if not batch.can_overlap or (batch.constrained and not self.can_recompute):
            return False
        return self.speculation is None or not waits_to_draft(self.speculation, batch)

    # Running groups.

    def _schedule_running(self, batch: Batch) -> bool:
        """Schedule the next tokens of every running group; preempt groups when blocks run out.

        Decodes always fit in the budget, so prefills share the rest. Blocks are allocated in order,
        and victims are taken from the end: so no group is preempted after it joined this step's
        batch.

        Returns:
            Whether a group was preempted.
        """
        begins_block = self._decodes.begin_step()
        running = self._background.choose(next_groups(self.running, self.stages))
        for group in self._background.paused:
            self._decodes.remove(group)
        counts = {
            group: [(decoder, 1)]
            if (decoder := group.decoder) is not None
            else self._count_tokens(group)
            for group in running
            if group.decode_row is None
        }
        decodes = len(self._decodes)
        decodes += sum(count == 1 for each in counts.values() for _, count in each)
        budget = self.max_num_batched_tokens - decodes
        drafts = make_drafts(
            self.speculation, running, self.cache, decodes, budget, model=self.draft_model
        )
        for group in running if drafts else ():  # those with drafts are no plain decodes now
            if group.decode_row is not None and group.sequences[0].id in drafts:
                self._decodes.remove(group)
                counts[group] = [(group.sequences[0], 1)]
        tokens = decodes + sum(map(len, drafts.values()))
        self._step_tokens = self._limit_tokens(tokens)
        budget = self._step_tokens - tokens
        others = [group for group in running if group.decode_row is None]
        begins_block = [group for group in begins_block if group.decode_row is not None]
        # If there are enough blocks for the whole step, all plain decodes get theirs at once.
        # Otherwise each takes its turn among the others, so that the last in order is preempted.
        preempted = False
        most = most_blocks(counts.values(), budget, drafts, self.cache) if begins_block else 0
        if not self._decodes.begin_blocks(self.cache, begins_block, spare=most):
            others = sorted([*others, *begins_block], key=ORDER)
        for group in others:
            while group.state is GroupState.RUNNING:
                try:
                    if group.decode_row is not None:
                        self._begin_block(group)
                    else:
                        budget -= self._schedule_group(batch, group, counts[group], budget, drafts)
                    break
                except OutOfBlocksError as error:
                    taken = isinstance(error, FileTakenError)
                    self._preempt(group if taken else choose_victim(self.running))
                    preempted = True
        batch.plain, batch.plain_tables = self._decodes.next_step()
        return preempted

    def _limit_tokens(self, decoded: int) -> int:
        """Return the maximum number of tokens of a step with `decoded` tokens that are no prefill.

        The rest, prefill, takes at most `max_prefill_seconds`, but is a block or an unsplit image.
        """
        seconds = self.policy.prefill_seconds(1)
        if not decoded or seconds is None or self.max_prefill_seconds == math.inf:
            return self.max_num_batched_tokens
        prefill = max(self._min_prefill, int(self.max_prefill_seconds / seconds))
        return min(self.max_num_batched_tokens, decoded + prefill)

    def _schedule_group(
        self,
        batch: Batch,
        group: SequenceGroup,
        counts: Counts,
        budget: int,
        drafts: Drafts,
    ) -> int:
        """Schedule the next tokens of a running group.

        Returns:
            The number of tokens taken from the prefill budget.

        Raises:
            OutOfBlocksError: There are not enough blocks.
        """
        if drafts and any(sequence.id in drafts for sequence, _ in counts):
            spans, used = self._next_spans(group, counts, budget)
            if self._add_drafted(batch, group, spans, drafts):
                return used
        elif (decoder := group.decoder) is not None:
            self._make_writable(decoder)
            most_tokens = decoder.num_prompt + group.request.max_tokens
            table = self.cache.own_table(decoder.id, most_tokens)
            plain = group.request.plain and decoder.matcher is None and self.stages == 1
            if table is not None and plain and decoder.num_output >= group.request.min_tokens:
                self._decodes.add(group, table)
                return 0
            start = decoder.num_computed
            self._add(batch, group, [Span(decoder.id, start, start + 1)])
            return 0
        else:
            spans, used = self._next_spans(group, counts, budget)
        self.cache.extend(spans)
        self._add(batch, group, spans)
        return used

    def _next_spans(
        self, group: SequenceGroup, counts: Counts, budget: int
    ) -> tuple[list[Span], int]:
        """Return a group's tokens to compute, as far as their images are or will be encoded."""
        spans, used = self._background.next_spans(group, counts, budget, self.cache)
        return self.images.fit(group.request, spans, used)

    def _begin_block(self, group: SequenceGroup) -> None:
        """Allocate the block that the next token of a plain decode needs."""
        (sequence,) = group.sequences
        self._make_writable(sequence)
        self._decodes.refresh(group, sequence.num_computed)

    def _make_writable(self, decoder: Sequence) -> None:
        """Allocate the slot of a sequence's last token; most tokens need no new block."""
        start = decoder.num_computed
        if not self.cache.extend_in_place(decoder.id, start):
            self.cache.extend([Span(decoder.id, start, start + 1)])

    def _add_drafted(
        self, batch: Batch, group: SequenceGroup, spans: list[Span], drafts: Drafts
    ) -> bool:
        """Schedule a group's tokens and their drafts, if there are enough blocks."""
        longer = [
            span._replace(end=span.end + len(drafts.get(span.sequence_id, ()))) for span in spans
        ]
        try:
            self.cache.extend(longer)
        except OutOfBlocksError:
            return False  # uncertain tokens preempt no group
        self._add(batch, group, spans, drafts)
        return True

    def _preempt(self, group: SequenceGroup) -> None:
        self.running.remove(group)
        self._decodes.remove(group)
        preempt(group, self.cache, self.policy, self.counters)
        insort(
            self.swapped if group.state is GroupState.SWAPPED else self.waiting, group, key=ORDER
        )

    def _count_tokens(self, group: SequenceGroup) -> Counts:
        """Return the tokens that each of a group's sequences could compute now; 1 is a decode.

        A scored prompt gets no more than the step can still score, maybe 0.

        Beams that are recomputed after a preemption stop before their last tokens, which one step
        computes together: a beam search advances only as a whole. A group that waits for a slow
        mask computes nothing.
        """
        if not group.soon_ready:
            return []
        ends = prefill_ends(group, self.cache)
        recomputing = (
            group.beam is not None
            and 1 < len(ends) == len(group.live)
            and any(sequence.num_uncomputed > 1 for sequence, _ in ends)
        )
        return [(s, self._limit_scored(group, s, end - int(recomputing))) for s, end in ends]

    def _limit_scored(self, group: SequenceGroup, sequence: Sequence, end: int) -> int:
        """Return the number of tokens up to `end` within the step's limit of scores.

        Tokens scored before a preemption are not scored again.
        """
        start = sequence.num_computed
        if group.wants_prompt_logprobs:
            first = max(start, group.num_scored)
            last = min(end, sequence.num_prompt - 1)
            scored = min(max(last - first, 0), self._scored_left)
            if scored < last - first:
                end = first + scored
            self._scored_left -= scored
        return end - start

    def _add(
        self, batch: Batch, group: SequenceGroup, spans: list[Span], drafts: Drafts | None = None
    ) -> None:
        by_id = {sequence.id: sequence for sequence in group.sequences}
        siblings = [s for s in group.live if not self.cache.holds(s.id)]
        for id_, start, end in spans:
            sequence = by_id[id_]
            sampled = [s for s in (sequence, *siblings) if s.num_tokens == end]
            tables, draft = self.cache.table(id_), drafts.get(id_, ()) if drafts else ()
            units, last = self.cache.num_units(id_), end + len(draft)
            batch.rest.append(
                ScheduledSequence(group, sequence, start, last, tables, sampled, draft, units)
            )

    # Swapped and waiting groups.

    def _room(self, batch: Batch) -> tuple[int, int]:
        """Return the numbers of sequences and tokens that the batch can still take."""
        taken = len(self._decodes)
        taken += sum(group.num_slots for group in self.running if group.decode_row is None)
        return self.max_num_seqs - taken, self._step_tokens - batch.num_tokens

    def _fits(self, group: SequenceGroup, blocks: int, slack: int) -> bool:
        """Return whether a group may take `blocks` blocks now, and there is room for its adapter.

        Beside other groups it must leave the watermark, and `slack` blocks for its own next tokens;
        alone it may take all.
        """
        if self.running:
            blocks += slack + self._watermark
        if blocks > self.cache.device.num_available:
            return False
        return adapters_fit(self.running, group, self.adapter_limit)

    def _first_ready(self, queue: list[SequenceGroup]) -> SequenceGroup | None:
        """Return the first group of a queue that waits neither for a mask nor for the file."""
        ready = (g for g in queue if g.ready and not g.in_flight)
        return next((g for g in ready if not waits_to_spill(g, self.cache)), None)

    def _swap_in(self, batch: Batch) -> None:
        while (group := self._first_ready(self.swapped)) is not None:
            if group in self._background.groups and self._background.full:
                return
            ends = prefill_ends(group, self.cache)
            ids = [sequence.id for sequence, _ in ends]
            seqs, tokens = self._room(batch)
            blocks = self.cache.blocks_to_swap(ids) + self.cache.blocks_to_share(ids)
            blocks += sum(self.cache.blocks_to_reserve(s.id, end) for s, end in ends)
            if group.num_slots > seqs or tokens < len(ids):
                return
            if not self._fits(group, blocks, slack=len(ids)):
                return
            self.swapped.remove(group)
            self.cache.swap_in(ids)
            self.counters["swap_ins"] += 1
            group.record(GroupEvent.SWAPPED_IN)
            self._start(batch, group, tokens)

    def _admit_waiting(self, batch: Batch) -> None:
        while (group := self._first_ready(self.waiting)) is not None:
            if group in self._background.groups and (self._background.full or self.swapped):
                return
            lead, *siblings = group.live
            seqs, tokens = self._room(batch)
            if tokens < 1:
                return
            reuse = group.request.sampling.prompt_logprobs is None
            salt = group.request.prefix_salt
            front = lead.token_ids[: lead.num_prompt] if siblings else lead.token_ids
            blocks = self.cache.blocks_to_admit(front, reuse=reuse, salt=salt)
            later = sum(1 + self.cache.blocks_for(s.num_output) for s in siblings)
            if group.num_slots > seqs or not self._fits(group, blocks, slack=1 + later):
                if group in self._background.groups or not self._background.paused:
                    return
                self._preempt(self._background.paused.pop())
                continue
            self.waiting.remove(group)
            lead.num_computed = self.cache.admit(lead.id, front, reuse=reuse, salt=salt)
            if not group.admitted:
                group.admitted = True
                group.cached_tokens = min(lead.num_computed, lead.num_prompt)
            self._start(batch, group, tokens)

    def _start(self, batch: Batch, group: SequenceGroup, budget: int) -> None:
        """Move a group that just got blocks into the running queue and the batch."""
        group.state = GroupState.RUNNING
        for sequence, end in prefill_ends(group, self.cache):
            self.cache.reserve(sequence.id, end)
        counts = self._count_tokens(group)
        decodes = sum(count == 1 for _, count in counts)
        spans, _ = self._next_spans(group, counts, budget - decodes)
        self._background.take(group)
        self.cache.extend(spans)
        insort(self.running, group, key=ORDER)
        self._add(batch, group, spans)
