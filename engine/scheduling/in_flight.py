"""Steps of a pipeline that are in flight: launched, and still computed by later stages.

Each has other groups, so that a stage needs no token that another stage still computes.
"""

from octavo.engine.scheduling.batch import Batch
from octavo.engine.scheduling.sequence import SequenceGroup


def count_in_flight(batch: Batch, change: int) -> None:
    """Count a step for its groups: 1 at its launch, -1 at its end.

    A group that is in flight gets no further tokens, and is not preempted.
    """
    for group in dict.fromkeys(batch.groups):
        group.in_flight += change


def next_groups(running: list[SequenceGroup], stages: int) -> list[SequenceGroup]:
    """Return the groups that the next step may compute: a share of those not in flight."""
    if stages == 1:
        return running
    share = -(-len(running) // stages)
    return [group for group in running if not group.in_flight][:share]
