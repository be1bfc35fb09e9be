"""Policy: the engine with the least work before the first token, with its cached prefix."""

from collections.abc import Sequence

from octavo.router.balancing.policy import C, RequestNeeds, batch_share, memory_share, with_room

SEQUENCE_TOKENS = 32
"""Cost of a used slot in a batch, in prompt tokens to compute. Lower values keep requests with the
engine that has their prefix; higher values balance the load."""


def prefix_aware(candidates: Sequence[C], request: RequestNeeds) -> C | None:
    """Return the engine with the least work before the request's first token, or None.

    Work is the prompt tokens that are not assumed to be cached, plus `SEQUENCE_TOKENS` for each
    used slot of the batch; memory has the same weight, but its used share is squared, so that it
    matters only when scarce. A token on the engine's disk counts by the time to read it. So a
    prefix stays on its engine until recomputing it on a less busy one costs less; then both have
    it.
    """
    roomy = with_room(candidates, request)
    places = max((candidate.max_num_seqs for candidate in roomy), default=0)

    def work(candidate: C) -> float:
        uncached = len(request.prompt) - candidate.saved_tokens(request)
        taken = batch_share(candidate) + memory_share(candidate) ** 2
        return uncached + SEQUENCE_TOKENS * places * taken

    chosen = min(roomy, key=work, default=None)
    if chosen is not None:
        chosen.expect(request)
    return chosen
