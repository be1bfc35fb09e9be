"""The queues of sequence groups, and the ends of groups and outputs."""

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.scheduling.counters import Counters
from octavo.engine.scheduling.drafting import DraftModel
from octavo.engine.scheduling.plain_decodes import KeptDecodes
from octavo.engine.scheduling.preemption import with_blocks
from octavo.engine.scheduling.request import FinishReason
from octavo.engine.scheduling.sequence import GroupState, Sequence, SequenceGroup
from octavo.engine.speculation.speculation import Speculation

ORDER = attrgetter("order")
_BEGUN = {GroupState.RUNNING, GroupState.SWAPPED}


class Queues:
    """Three queues of sequence groups: waiting, running, swapped.

    Each is sorted by `SequenceGroup.order`.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        speculation: Speculation | None,
        draft_model: DraftModel | None,
    ) -> None:
        self.cache = cache
        self.speculation = speculation
        self.draft_model = draft_model
        self.counters = Counters()
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self._decodes = KeptDecodes(layers.block_size for layers in cache.groups)

    def submit(self, group: SequenceGroup) -> None:
        """Queue a new group."""
        insert(self.waiting, group)

    @property
    def idle(self) -> bool:
        """Whether no group is left."""
        return not (self.running or self.swapped or self.waiting)

    @property
    def can_recompute(self) -> bool:
        """Whether a token may be computed twice; not with states, which would count it twice."""
        return not any(layers.state_blocks for layers in self.cache.groups)

    @property
    def waits_for_masks(self) -> bool:
        """Return whether a group cannot be scheduled until a mask of its constraint is ready."""
        return not all(group.ready for group in self.groups())

    def groups(self) -> Iterator[SequenceGroup]:
        """Yield every group that is not finished."""
        yield from self.running
        yield from self.swapped
        yield from self.waiting

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
            insert(self.waiting, group)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group from its queue, and free all its blocks."""
        self._decodes.remove(group)
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


def insert(queue: list[SequenceGroup], group: SequenceGroup) -> None:
    """Put a group into a queue in its order."""
    insort(queue, group, key=ORDER)
