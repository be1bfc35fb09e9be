"""Decides how many engines there are, by how long requests wait and how full KV caches are.

The rule is that of Kubernetes' HorizontalPodAutoscaler, with the targets of
deploy/kubernetes/components/autoscaling.
"""

import math
from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 15.0
"""Seconds over which waits are averaged."""
TOLERANCE = 0.1
"""Relative distance from a target within which the number stays."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The load at one time.

    Attributes:
        time: In seconds.
        engines: Engines that take requests.
        waiting: Requests that wait, in the router and in engines.
        admitted: Requests that the router has given to engines so far.
        kv_use: Share of the engines' KV cache that is in use.
    """

    time: float
    engines: int
    waiting: int
    admitted: float
    kv_use: float


@dataclass(frozen=True, slots=True)
class Targets:
    """The limits of the number of engines, and what it aims at.

    Attributes:
        least: Minimum of engines.
        most: Maximum of engines.
        wait: Mean seconds that requests wait.
        kv_use: Mean use of the KV cache, 0 to 1.
        shrink_after: Seconds for which fewer engines must suffice before one is ended.
    """

    least: int
    most: int
    wait: float = 2.0
    kv_use: float = 0.7
    shrink_after: float = 300.0


class Autoscaler:
    """Decides from a sample at a time.

    Args:
        targets: What to aim at.
    """

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._samples: deque[Sample] = deque()
        self._fewer_since: float | None = None

    def decide(self, sample: Sample, wanted: int) -> int:
        """Return how many engines there should be.

        It adds none while engines start, as these may be enough, and ends one at a time.

        Args:
            sample: The load now.
            wanted: How many there should have been so far.
        """
        targets = self._targets
        self._samples.append(sample)
        while self._samples[0].time < sample.time - WINDOW_SECONDS:
            self._samples.popleft()
        ratio = max(self._wait() / targets.wait, sample.kv_use / targets.kv_use)
        number = sample.engines
        if abs(ratio - 1) > TOLERANCE:
            number = math.ceil(sample.engines * ratio)
        number = min(max(number, targets.least), targets.most)
        if self._fewer_suffice(sample.time, number, wanted):
            return wanted - 1
        return max(number, wanted) if sample.engines >= wanted else wanted

    def _fewer_suffice(self, now: float, number: int, wanted: int) -> bool:
        """Return whether fewer engines than wanted have been enough for long, and forget it then.

        How few are enough is known only of one less: without a queue, its length says nothing.
        """
        if number >= wanted:
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = now
        elif now >= self._fewer_since + self._targets.shrink_after:
            self._fewer_since = None
            return True
        return False

    def _wait(self) -> float:
        """Return the mean seconds that requests wait: how many wait, by how many go on a second."""
        first, last = self._samples[0], self._samples[-1]
        seconds = last.time - first.time
        waiting = sum(each.waiting for each in self._samples) / len(self._samples)
        return waiting * seconds / max(last.admitted - first.admitted, 1.0)
