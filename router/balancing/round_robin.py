"""Each engine in turn, whatever it has to do: the measure for the others."""

from collections import defaultdict
from collections.abc import Sequence

from octavo.router.balancing.policy import C, Demand, has_room


class RoundRobin:
    """Chooses a model's engines in turn, except full ones."""

    def __init__(self) -> None:
        self._turns: defaultdict[str, int] = defaultdict(int)

    def choose(self, candidates: Sequence[C], demand: Demand) -> C | None:
        """Return the next engine with room, or None."""
        first = self._turns[demand.model]
        for turn in range(first, first + len(candidates)):
            candidate = candidates[turn % len(candidates)]
            if has_room(candidate, demand.sequences):
                self._turns[demand.model] = turn + 1
                return candidate
        return None
