"""Chooses the number of engines from the mean wait of requests and the use of KV caches.

The rule is that of Kubernetes' HorizontalPodAutoscaler, with the targets of the Helm chart's
(deploy/octavo/values.yaml).
"""

import math
from collections import deque
from dataclasses import dataclass

WINDOW_SECONDS = 15.0
"""Length of the window for the mean wait, in seconds."""
TOLERANCE = 0.1
"""Relative deviation from a target that changes nothing."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The load at one point in time.

    Attributes:
        time: Time of the measurement, in seconds.
        engines: Engines that take requests.
        waiting: Requests that wait, in the router and in engines.
        admitted: Total number of requests that the router has dispatched to engines.
        kv_use: Share of the engines' KV cache in use, 0 to 1.
    """

    time: float
    engines: int
    waiting: int
    admitted: float
    kv_use: float


@dataclass(frozen=True, slots=True)
class Targets:
    """Limits of the number of engines, and target values of the load.

    Attributes:
        least: Minimum number of engines.
        most: Maximum number of engines.
        wait: Target of the mean wait of requests, in seconds.
        kv_use: Target of the mean KV-cache use, 0 to 1.
        shrink_after: Seconds that fewer engines must suffice before one is removed.
    """

    least: int
    most: int
    wait: float = 2.0
    kv_use: float = 0.7
    shrink_after: float = 300.0


class Autoscaler:
    """Chooses the number of engines after each sample.

    Args:
        targets: The limits and targets.
    """

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._samples: deque[Sample] = deque()
        self._fewer_since: float | None = None

    def decide(self, sample: Sample, wanted: int) -> int:
        """Return the number of engines to run.

        It adds none while engines start, as these may be enough, and removes one at a time.

        Args:
            sample: The current load.
            wanted: The previous result.
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
        """Return whether to remove an engine: fewer have been enough for `shrink_after` seconds.

        Without a queue, its length does not tell how many fewer are enough: so remove only one.
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
        """Return the mean wait in seconds: waiting requests divided by the rate of admission."""
        first, last = self._samples[0], self._samples[-1]
        seconds = last.time - first.time
        waiting = sum(each.waiting for each in self._samples) / len(self._samples)
        return waiting * seconds / max(last.admitted - first.admitted, 1.0)
