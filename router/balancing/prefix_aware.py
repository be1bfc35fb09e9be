"""Choose the engine with the least work for a request, counting its cached prefix."""

from collections.abc import Sequence

from octavo.router.balancing.policy import C, RequestNeeds, batch_share, memory_share, with_room

SEQUENCE_TOKENS = 32
"""What a place in a batch is worth, in tokens of prompt to compute. The less, the longer
requests are held to the engine that has their prefix; the more, the more even the load."""


def prefix_aware(candidates: Sequence[C], request: RequestNeeds) -> C | None:
    """Return the engine with the least work before the request's first token, or None.

    Work is the prompt's tokens that the engine is not believed to hold, plus
    `SEQUENCE_TOKENS` for each place taken in its batch; memory counts as much,
    but by its share's square: little while there is plenty. So a prefix stays
    with its engine until that has so much more to do than another that
    computing the prefix there costs less; then both have it.
    """
    roomy = with_room(candidates, request)
    places = max((candidate.max_num_seqs for candidate in roomy), default=0)

    def work(candidate: C) -> float:
        uncached = len(request.prompt) - candidate.cached_tokens(request)
        taken = batch_share(candidate) + memory_share(candidate) ** 2
        return uncached + SEQUENCE_TOKENS * places * taken

    chosen = min(roomy, key=work, default=None)
    if chosen is not None:
        chosen.expect(request)
    return chosen
