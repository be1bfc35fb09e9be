"""Policy: each engine in turn, regardless of load; the baseline for other policies."""

from collections import defaultdict
from collections.abc import Sequence

from octavo.router.balancing.policy import C, RequestNeeds, has_room


class RoundRobin:
    """Choose a model's engines in turn, except full ones."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, int] = defaultdict(int)

    def __call__(self, candidates: Sequence[C], request: RequestNeeds) -> C | None:
        """Return the next engine with room, or None."""
        first = self._turns[request.model]
        for turn in range(first, first + len(candidates)):
            candidate = candidates[turn % len(candidates)]
            if has_room(candidate, request.sequences):
                self._turns[request.model] = turn + 1
                return candidate
        return None
