"""Reserve places of an engine for the tenant that was served the least.

If one tenant floods the queue, turns alone do not help another: there is never a free place when
its request arrives. So an engine's last places are given only to the least served active tenant:
it finds one at once, and the next place that falls free is kept again. A tenant that asks for no
more than its own share of all places is not held to this.

Each kept place is one that does no work, so as few are kept as the tenant may ask for before others
fall free: if it has asked for `count` sequences within `span` seconds, and `ended` of the running
ones are expected to end in that time, `count - ended` must be free now. That is few if ends are
spread over time, and more if requests that began together are about to end together.
"""

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

RECENT_REQUESTS = 64
"""Number of newest requests of a tenant that its demand is estimated from."""
SPARE_SHARE = 1 / 12
"""Share of an engine's places kept for more demand than was seen."""
MAX_KEPT_SHARE = 1 / 3
"""Maximum share of an engine's places that is kept."""


class Span(NamedTuple):
    """The shortest time, in seconds, in which a tenant asked for so many sequences or more."""

    sequences: int
    seconds: float


class Demand:
    """A tenant's recent requests: when, and for how many sequences.

    Attributes:
        weight: The tenant's, as of then.
        newest: When it asked last.
    """

    def __init__(self) -> None:
        self.weight = 1.0
        self.newest = -math.inf
        self._asked: deque[tuple[float, int]] = deque(maxlen=RECENT_REQUESTS)
        self._spans: list[Span] | None = None

    def add(self, sequences: int, now: float, weight: float = 1.0) -> None:
        """Record a request."""
        self.weight = weight
        self.newest = now
        self._asked.append((now, sequences))
        self._spans = None

    @property
    def spans(self) -> Sequence[Span]:
        """How fast it asks, for every count that was seen, the least first."""
        if self._spans is None:
            shortest: dict[int, float] = {}
            asked = list(self._asked)
            for first, (begun, _) in enumerate(asked):
                counts = accumulate(sequences for _, sequences in asked[first:])
                for count, (time, _) in zip(counts, asked[first:], strict=True):
                    shortest[count] = min(time - begun, shortest.get(count, math.inf))
            counts_down = sorted(shortest, reverse=True)
            seconds = accumulate((shortest[count] for count in counts_down), min)
            self._spans = list(map(Span, counts_down, seconds))[::-1]
        return self._spans


def kept_places(places: int, spans: Sequence[Span], endings: Sequence[float]) -> int:
    """Return how many of an engine's places are to be free for the least served tenant.

    Args:
        places: That the engine has.
        spans: How fast that tenant asks.
        endings: In how many seconds each sequence that runs is expected to end, the
            next one first; empty where that is not known.
    """
    horizon = endings[-1] if endings else math.inf
    kept = ended = 0
    for count, seconds in spans:
        if seconds > horizon:  # by then all places will have changed hands
            break
        while ended < len(endings) and endings[ended] <= seconds:
            ended += 1
        kept = max(kept, count - ended)
    return min(kept + math.ceil(places * SPARE_SHARE), int(places * MAX_KEPT_SHARE))
