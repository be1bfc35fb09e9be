"""The chunks of prefills: how far a step may compute each sequence, and how many blocks this takes.

A prompt that exceeds a step's budget is computed over several steps, so that it does not delay the
decodes of others (Sarathi-Serve, OSDI 2024). A decode is a chunk of one token.
"""

from collections.abc import Iterable

from octavo.engine.kv_cache import KVCacheManager, Span
from octavo.engine.scheduling.drafting import Drafts
from octavo.engine.scheduling.preemption import with_blocks
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup

Counts = list[tuple[Sequence, int]]
"""A group's sequences, each with the number of tokens that a step could compute; 1 is a decode."""


def prefill_ends(group: SequenceGroup, cache: KVCacheManager) -> list[tuple[Sequence, int]]:
    """Return the end of each sequence's prefill: the prompt's end if siblings wait for it.

    The last token of an output of maximum length is not computed: no token follows it.
    """
    sequences = with_blocks(group, cache)
    if len(sequences) < len(group.live):
        return [(s, s.num_prompt) for s in sequences]
    others = group.request.max_tokens - 1
    return [(s, min(s.num_tokens, s.num_prompt + others)) for s in sequences]


def next_spans(counts: Counts, budget: int, cache: KVCacheManager) -> tuple[list[Span], int]:
    """Return a group's tokens to compute, and their share of the prefill budget."""
    spans, used = [], 0
    for sequence, count in counts:
        start, taken = sequence.num_computed, count
        if count > 1:
            taken = min(count, budget - used)
            if taken > 0:
                taken = cache.pause_before(sequence.id, start, start + taken) - start
            used += taken
        if taken > 0:
            spans.append(Span(sequence.id, start, start + taken))
    return spans, used


def most_blocks(
    groups: Iterable[Counts], budget: int, drafts: Drafts, cache: KVCacheManager
) -> int:
    """Return an upper bound on the blocks that a step may allocate for some groups."""
    tokens = [
        min(count, max(budget, 1)) + len(drafts.get(sequence.id, ()))
        for counts in groups
        for sequence, count in counts
    ]
    # In each layer group, the first and the last block may be shared, or hold only one token.
    blocks = sum(count // cache.block_size + 2 for count in tokens)
    return blocks * len(cache.groups)
