"""The engine with the least to do, by its batch and its memory."""

from collections.abc import Sequence

from octavo.router.balancing.policy import C, RequestNeeds, occupancy, with_room


def least_loaded(candidates: Sequence[C], request: RequestNeeds) -> C | None:
    """Return the least occupied engine with room, or None."""
    return min(with_room(candidates, request), key=occupancy, default=None)
