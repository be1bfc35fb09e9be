"""Policy: the engine with the least used batch and memory."""

from collections.abc import Sequence

from octavo.router.balancing.policy import C, RequestNeeds, occupancy, with_room


def least_loaded(candidates: Sequence[C], request: RequestNeeds) -> C | None:
    """Return the least occupied engine with room, or None."""
    return min(with_room(candidates, request), key=occupancy, default=None)
