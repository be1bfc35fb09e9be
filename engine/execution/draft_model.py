"""A small model that drafts tokens for a large one.

It computes each sequence in its own paged cache, and samples every token as the large model will:
with the request's parameters and the random number of the token's position. So a draft model that
agrees with the large one is right at any temperature, not only for greedy outputs.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import takewhile

import structlog

from octavo.engine.execution.executor import Executor
from octavo.engine.kv_cache import KVCacheManager, OutOfBlocksError, Span
from octavo.engine.scheduling.batch import Batch, ScheduledSequence
from octavo.engine.scheduling.drafting import Wanted
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Shadow:
    """The draft model's copy of a sequence.

    Attributes:
        group: Its own group, whose request asks only for tokens.
        sequence: Its tokens; drafted ones are last.
        num_agreed: Number of tokens known to equal the large model's sequence.
    """

    group: SequenceGroup
    sequence: Sequence
    num_agreed: int = 0


class DraftModel:
    """Drafts tokens with a model; see `octavo.engine.scheduling.drafting.DraftModel`."""

    def __init__(
        self,
        executor: Executor,
        cache: KVCacheManager,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        """Set up for all sequences of an engine.

        Args:
            executor: The draft model's executor.
            cache: The manager of its blocks, without a prefix cache.
            max_model_len: Maximum length of the draft model's sequences.
            max_num_batched_tokens: Maximum number of tokens that it computes at a time.
        """
        self._executor = executor
        self._cache = cache
        self._max_model_len = max_model_len
        self._max_num_batched_tokens = max_num_batched_tokens
        self._failed = False
        self._shadows: OrderedDict[int, _Shadow] = OrderedDict()  # least recently drafted first

    def draft(self, wanted: list[Wanted]) -> list[list[int]]:
        """Return drafts for each sequence: as many tokens as requested, or fewer.

        A sequence that the draft model has not caught up with, for example because its prompt is
        longer than a step, has no draft yet. After an error there are no more drafts.
        """
        if self._failed:
            return [[] for _ in wanted]
        try:
            return self._draft(wanted)
        except Exception:
            log.exception("the draft model failed: no more tokens are drafted")
            self._failed = True
            for sequence_id in list(self._shadows):
                self.forget(sequence_id)
            return [[] for _ in wanted]

    def _draft(self, wanted: list[Wanted]) -> list[list[int]]:
        drafts: dict[int, list[int]] = {each.sequence.id: [] for each in wanted}
        most = {each.sequence.id: self._limit(each) for each in wanted}
        drafting = [self._follow(each) for each in wanted if most[each.sequence.id] > 0]
        while drafting:
            drafting = [
                shadow
                for shadow in self._compute(drafting, keep=drafts)
                if self._take(shadow, drafts[shadow.sequence.id])
                and len(drafts[shadow.sequence.id]) < most[shadow.sequence.id]
            ]
        return list(drafts.values())

    def forget(self, sequence_id: int) -> None:
        """Drop the sequence of this id, if any, and its blocks."""
        if self._shadows.pop(sequence_id, None) is not None and self._cache.holds(sequence_id):
            self._cache.free(sequence_id)

    def check_idle(self) -> None:
        """Assert that no block is in use."""
        self._cache.check_idle()

    def _limit(self, wanted: Wanted) -> int:
        return min(wanted.most, self._max_model_len - wanted.sequence.num_tokens)

    def _follow(self, wanted: Wanted) -> _Shadow:
        """Return a sequence's shadow with its current tokens; roll back wrong drafts."""
        own, shadow = wanted.sequence, self._shadows.pop(wanted.sequence.id, None)
        if shadow is None:
            shadow = _shadow_of(wanted)
        self._shadows[own.id] = shadow
        sequence = shadow.sequence
        agreed = shadow.num_agreed
        drafted = zip(sequence.token_ids[agreed:], own.token_ids[agreed:], strict=False)
        agreed += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], drafted))
        sequence.token_ids[agreed:] = own.token_ids[agreed:]
        shadow.num_agreed = own.num_tokens
        computed = min(agreed, own.num_tokens - 1)  # the last token's logits are needed again
        if computed < sequence.num_computed:
            sequence.num_computed = computed
            self._cache.roll_back(own.id, computed)
        return shadow

    def _compute(self, shadows: Iterable[_Shadow], keep: Iterable[int]) -> list[_Shadow]:
        """Compute sequences' missing tokens; return those that got a sampled token.

        Args:
            shadows: The sequences.
            keep: Ids of sequences that keep their blocks.
        """
        batch, left = Batch(), self._max_num_batched_tokens
        for shadow in shadows:
            sequence, start = shadow.sequence, shadow.sequence.num_computed
            end = min(sequence.num_tokens, start + left)
            if end == start or not self._make_room(shadow, end, keep):
                continue
            left -= end - start
            tables = self._cache.table(sequence.id)
            sampled = [sequence] if end == sequence.num_tokens else []
            batch.rest.append(
                ScheduledSequence(shadow.group, sequence, start, end, tables, sampled)
            )
            sequence.num_computed = end
        if not batch.rest:
            return []
        batch.transfers = self._cache.take_transfers()
        output = self._executor.execute(batch)
        for sequence, token_id in zip(output.sequences, output.token_ids, strict=True):
            sequence.token_ids.append(token_id)
        return [
            self._shadows[scheduled.sequence.id] for scheduled in batch.rest if scheduled.sampled
        ]

    def _make_room(self, shadow: _Shadow, end: int, keep: Iterable[int]) -> bool:
        """Make a sequence's tokens up to `end` writable; return whether blocks suffice.

        Sequences without a current draft give up their blocks, least recently drafted first.
        """
        id_, kept = shadow.sequence.id, set(keep)
        while True:
            try:
                if not self._cache.holds(id_):
                    self._cache.admit(id_, shadow.sequence.token_ids[:end], reuse=False)
                self._cache.extend([Span(id_, shadow.sequence.num_computed, end)])
            except OutOfBlocksError:
                victim = next((other for other in self._shadows if other not in kept), None)
                if victim is None:
                    return False
                self.forget(victim)
            else:
                return True

    @staticmethod
    def _take(shadow: _Shadow, draft: list[int]) -> bool:
        """Add the sampled token to a draft; return whether more may follow.

        A token that ends the output is not drafted: the step samples it anyway.
        """
        token_id = shadow.sequence.token_ids[-1]
        if token_id in shadow.group.request.stopping:
            return False
        draft.append(token_id)
        return True


def _shadow_of(wanted: Wanted) -> _Shadow:
    own, request = wanted.sequence, wanted.group.request
    sampling = replace(request.sampling, logprobs=None, prompt_logprobs=None)
    sequence = Sequence(own.id, own.index, [], own.num_prompt)
    plain = replace(request, sampling=sampling, adapter=None)
    return _Shadow(SequenceGroup(plain, [sequence]), sequence)
