"""Choose the engine with the least work for a request, counting its cached prefix."""

from collections.abc import Sequence

from octavo.router.balancing.policy import C, RequestNeeds, batch_share, memory_share, with_room

SEQUENCE_TOKENS = 32
"""What a place in a batch is worth, in tokens of prompt to compute. The less, the longer
requests are held to the engine that has their prefix; the more, the more even the load."""


class PrefixAware:
    """Chooses the engine with the least work before the request's first token.

    Work is the prompt's tokens that the engine is not believed to hold, plus
    `SEQUENCE_TOKENS` for each place taken in its batch; memory counts as much,
    but by its share's square: little while there is plenty. So a prefix stays
    with its engine until that has so much more to do than another that
    computing the prefix there costs less; then both have it.
    """

    def choose(self, candidates: Sequence[C], request: RequestNeeds) -> C | None:
        """Return the engine with the least work, or None if none has room."""
        roomy = with_room(candidates, request)
        prompt = request.prompt
        places = max((candidate.max_num_seqs for candidate in roomy), default=0)

        def work(candidate: C) -> float:
            uncached = len(prompt) - candidate.cached_tokens(prompt) if prompt else 0
            taken = batch_share(candidate) + memory_share(candidate) ** 2
            return uncached + SEQUENCE_TOKENS * places * taken

        chosen = min(roomy, key=work, default=None)
        if chosen is not None and prompt:
            chosen.expect(prompt)
        return chosen
