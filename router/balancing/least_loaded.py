"""The engine with the least to do, by its batch and its memory."""

from collections.abc import Sequence

from octavo.router.balancing.policy import C, Demand, occupancy, with_room


class LeastLoaded:
    """Chooses the least occupied engine."""

    def choose(self, candidates: Sequence[C], demand: Demand) -> C | None:
        """Return the least occupied engine with room, or None."""
        return min(with_room(candidates, demand), key=occupancy, default=None)
