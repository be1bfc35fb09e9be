"""Reserve slots of an engine for the tenant that was served the least.

If one tenant floods the queue, turns alone do not help another: there is never a free slot when
its request arrives. So an engine's last slots are given only to the least served active tenant:
it finds one at once, and the next slot that falls free is reserved again. A tenant that asks for no
more than its own share of all slots is not held to this.

A reserved slot does no work, so as few are reserved as the tenant may ask for before others fall
free: if it has asked for `count` sequences within `seconds`, and `ended` of the running ones are
expected to end in that time, `count - ended` must be free now. That is few if ends are spread over
time, and more if requests that began together are about to end together.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

RECENT_REQUESTS = 64
"""Number of newest requests of a tenant that its demand is estimated from."""
SPARE_SHARE = 1 / 12
"""Share of an engine's slots reserved for more demand than was seen."""
MAX_RESERVED_SHARE = 1 / 3
"""Maximum share of an engine's slots that is reserved."""


class Burst(NamedTuple):
    """The shortest time in which a tenant asked for at least this number of sequences."""

    sequences: int
    seconds: float


class RecentRequests:
    """A tenant's recent requests: when, and for how many sequences.

    Attributes:
        weight: The tenant's weight at its newest request.
        newest: Time of the newest request.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.newest = -math.inf
        self._asked: deque[tuple[float, int]] = deque(maxlen=RECENT_REQUESTS)
        self._bursts: list[Burst] | None = None

    def add(self, sequences: int, now: float, weight: float = 1.0) -> None:
        """Record a request."""
        self.weight = weight
        self.newest = now
        self._asked.append((now, sequences))
        self._bursts = None

    @property
    def bursts(self) -> Sequence[Burst]:
        """A burst for every count of sequences that was seen, the smallest count first."""
        if self._bursts is None:
            shortest: dict[int, float] = {}
            asked = list(self._asked)
            for first, (begun, _) in enumerate(asked):
                counts = accumulate(sequences for _, sequences in asked[first:])
                for count, (time, _) in zip(counts, asked[first:], strict=True):
                    shortest[count] = min(time - begun, shortest.get(count, math.inf))
            counts_down = sorted(shortest, reverse=True)
            seconds = accumulate((shortest[count] for count in counts_down), min)
            self._bursts = list(map(Burst, counts_down, seconds))[::-1]
        return self._bursts


def reserved_slots(slots: int, bursts: Sequence[Burst], endings: Sequence[float]) -> int:
    """Return the number of an engine's slots to keep free for the least served tenant.

    Args:
        slots: All slots of the engine.
        bursts: That tenant's bursts.
        endings: Seconds until each running sequence is expected to end, the next one first; empty
            if they are not known.
    """
    horizon = endings[-1] if endings else math.inf
    reserved = ended = 0
    for count, seconds in bursts:
        if seconds > horizon:  # by then all slots will have changed hands
            break
        while ended < len(endings) and endings[ended] <= seconds:
            ended += 1
        reserved = max(reserved, count - ended)
    return min(reserved + math.ceil(slots * SPARE_SHARE), int(slots * MAX_RESERVED_SHARE))
