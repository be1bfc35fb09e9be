"""Say whether the adapters of running groups and of another fit the device together."""

from collections.abc import Iterable

from octavo.engine.scheduling.request import RequestAdapter
from octavo.engine.scheduling.sequence import SequenceGroup


def adapters_fit(running: Iterable[SequenceGroup], group: SequenceGroup, limit: int | None) -> bool:
    """Return whether a group may run beside others, by the memory of their adapters.

    A group whose adapter another one has already takes nothing more.

    Args:
        running: The groups that run.
        group: The group to run beside them.
        limit: Bytes for adapters on the device; None: no limit.
    """
    adapter = group.request.adapter
    if limit is None or adapter is None:
        return True
    used: set[RequestAdapter] = {
        other.request.adapter for other in running if other.request.adapter is not None
    }
    return adapter in used or sum(each.nbytes for each in used) + adapter.nbytes <= limit
