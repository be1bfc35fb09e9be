"""Checks whether the adapters of running groups and of another group fit on the device."""

from collections.abc import Iterable

from octavo.engine.scheduling.request import RequestAdapter
from octavo.engine.scheduling.sequence import SequenceGroup


def adapters_fit(running: Iterable[SequenceGroup], group: SequenceGroup, limit: int | None) -> bool:
    """Return whether adapter memory allows a group to run beside others.

    Groups with the same adapter share its memory.

    Args:
        running: The running groups.
        group: The group to add.
        limit: Bytes for adapters on the device; None: no limit.
    """
    adapter = group.request.adapter
    if limit is None or adapter is None:
        return True
    used: set[RequestAdapter] = {
        other.request.adapter for other in running if other.request.adapter is not None
    }
    return adapter in used or sum(each.nbytes for each in used) + adapter.nbytes <= limit
