"""Who is preempted when blocks run out, and how: a whole group, swapped out or dropped.

PagedAttention, section 4.5: a sequence reads all of its K and V in each step, so a group without
some of its blocks could not continue, and would still hold the others. `swap_or_recompute.py`
chooses between swapping and dropping.
"""

from collections import Counter

from octavo.engine.kv_cache import KVCacheManager, OutOfBlocksError
from octavo.engine.scheduling.sequence import GroupEvent, GroupState, Sequence, SequenceGroup
from octavo.engine.scheduling.swap_or_recompute import PreemptionPolicy


def choose_victim(running: list[SequenceGroup]) -> SequenceGroup:
    """Return the last running group in order: the newest of the lowest priority.

    The paper also preempts the latest request first, so that the earliest always progresses and
    none starves. The newest has also computed least, so its preemption costs least. Groups that
    stages still compute keep their blocks.
    """
    return next(group for group in reversed(running) if not group.in_flight)


def with_blocks(group: SequenceGroup, cache: KVCacheManager) -> list[Sequence]:
    """Return the unfinished sequences with blocks; siblings get theirs from the lead."""
    return [sequence for sequence in group.live if cache.holds(sequence.id)]


def waits_to_spill(group: SequenceGroup, cache: KVCacheManager) -> bool:
    """Return whether a group must be spilled and the file still holds another one."""
    if cache.spilled.id is None:
        return False
    return any(
        cache.spilled.outgrows(s.num_tokens) and s.id != cache.spilled.id for s in group.live
    )


def preempt(
    group: SequenceGroup, cache: KVCacheManager, policy: PreemptionPolicy, counters: Counter[str]
) -> None:
    """Take all blocks from all sequences of a group.

    Afterwards the group is SWAPPED if its blocks were copied to swap space, or WAITING if they were
    dropped and its tokens must be recomputed. The file keeps what is spilled of a swapped group.
    """
    sequences = with_blocks(group, cache)
    for sequence in sequences:
        cache.trim(sequence.id, sequence.num_computed)
    ids = [sequence.id for sequence in sequences]
    blocks = cache.blocks_to_swap(ids)
    tokens = sum(sequence.num_computed for sequence in sequences)
    waits = waits_to_spill(group, cache)
    if blocks and not waits and policy.prefers_swap(blocks=blocks, tokens=tokens):
        try:
            cache.swap_out(ids)
        except OutOfBlocksError:
            counters["swap_space_full"] += 1
        else:
            counters["preemptions_swap"] += 1
            group.record(GroupEvent.SWAPPED_OUT)
            group.state = GroupState.SWAPPED
            return
    counters["preemptions_recompute"] += 1
    group.record(GroupEvent.DROPPED)
    for sequence in sequences:
        cache.free(sequence.id)
        sequence.num_computed = 0
    group.state = GroupState.WAITING
