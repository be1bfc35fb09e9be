"""Advance a beam search by one token: fork, keep and free its beams' blocks."""

from collections.abc import Iterator
from dataclasses import replace

from octavo.engine.kv_cache import KVCacheManager
from octavo.engine.scheduling.batch import Continuations
from octavo.engine.scheduling.beam_search import Candidate
from octavo.engine.scheduling.sequence import Sequence, SequenceGroup


def advance_search(
    group: SequenceGroup,
    continuations: dict[int, Continuations],
    cache: KVCacheManager,
    fork_ids: Iterator[int],
) -> bool:
    """Replace a group's beams by those that continue.

    Args:
        group: Its sequences are the running beams, best first.
        continuations: Most likely next tokens of each beam, by sequence id.
        cache: The KV cache of the beams' blocks, on the device or in swap space. It has none if the
            group was preempted for recomputation after the step was launched.
        fork_ids: Ids for new sequences.

    Returns:
        Whether the search continues; if not, the group does not change.
    """
    assert group.beam is not None
    beams, request = group.sequences, group.request
    chosen = group.beam.advance(
        [beam.token_ids[beam.num_prompt :] for beam in beams],
        [continuations[beam.id] for beam in beams],
        stopping=request.stopping,
        max_tokens=request.max_tokens,
    )
    if not chosen:
        return False
    outputs = [[*beams[c.beam].token_ids, c.token_id] for c in chosen]
    group.sequences = [
        _continue(beams[c.beam], chosen[:i], c, cache, fork_ids) for i, c in enumerate(chosen)
    ]
    for sequence, token_ids in zip(group.sequences, outputs, strict=True):
        sequence.token_ids = token_ids
    for beam in beams:
        if beam not in group.sequences and cache.holds(beam.id):
            cache.free(beam.id)
    return True


def _continue(
    beam: Sequence,
    before: list[Candidate],
    candidate: Candidate,
    cache: KVCacheManager,
    fork_ids: Iterator[int],
) -> Sequence:
    """Return the beam itself for its first candidate, and a fork for each other one."""
    if all(earlier.beam != candidate.beam for earlier in before):
        return beam
    matcher = None if beam.matcher is None else beam.matcher.copy()
    fork = replace(beam, id=next(fork_ids), matcher=matcher)
    if cache.holds(beam.id):
        cache.fork(beam.id, fork.id, beam.num_computed)
    return fork
