"""Measures recent rates: how fast the queue drains, and how fast engines serve."""

import math
import time
from collections.abc import Callable
from typing import Any

from octavo.router.admission.claims import Claim
from octavo.router.admission.output_lengths import MIN_SAMPLES

Clock = Callable[[], float]

RECENT_SECONDS = 15.0
"""Time constant of averages in seconds; `Pace` drops averages without samples for so long."""
SAFE_DEVIATIONS = 2.0
"""Mean deviations above the mean: 19 of 20 requests stay below if normally distributed. The
estimator is that of TCP's timeouts (Jacobson, SIGCOMM 1988)."""
MARGIN_BOUNDS = (1.25, 4.0)
"""Minimum and maximum of `Margin`."""
MARGIN_STEP = 0.25
"""Increase of `Margin` for each queued request that misses its deadline."""
ALLOWED_MISSES = 0.002
"""Share of queued requests that may miss their deadlines."""


class DrainRate:
    """Rate at which tokens leave a queue, measured only while requests wait.

    At other times, the clients' rate would be measured, not the engines'.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # time of the last update, while requests wait
        self._tokens = self._seconds = 0.0
        self._requests = 0.0

    def begin(self) -> None:
        """Start measuring, when a request waits."""
        if self._since is None:
            self._since = self._clock()

    def end(self) -> None:
        """Stop measuring, when no request waits."""
        self._pass_time()
        self._since = None

    def add(self, tokens: int) -> None:
        """Record that a request left the queue for an engine."""
        self._pass_time()
        self._tokens += tokens
        self._requests += 1

    def per_second(self) -> float | None:
        """Return tokens per second, or None after too few requests."""
        self._pass_time()
        if self._requests < MIN_SAMPLES or not self._seconds:
            return None
        return self._tokens / self._seconds

    def _pass_time(self) -> None:
        if self._since is None:
            return
        now = self._clock()
        passed, self._since = now - self._since, now
        decay = math.exp(-passed / RECENT_SECONDS)
        self._tokens *= decay
        self._requests *= decay
        self._seconds = self._seconds * decay + passed


class Margin:
    """The factor on estimated waits with which nearly all admitted requests meet their deadlines.

    It approximates a quantile of the ratio of true to estimated waits (Robbins and Monro, 1951):
    each request that misses its deadline in the queue raises it, and each one served lowers it, in
    the allowed proportion. So the queue is shorter if the engine's pace varies. With a fixed
    factor, late refusals of queued requests took over 500 ms (benchmarks/results/router.md).
    """

    def __init__(self) -> None:
        self.value = MARGIN_BOUNDS[0]

    def kept(self) -> None:
        """Record that a queued request got an engine in time."""
        self.value = max(self.value - MARGIN_STEP * ALLOWED_MISSES, MARGIN_BOUNDS[0])

    def missed(self) -> None:
        """Record that a queued request could no longer meet its deadline."""
        self.value = min(self.value + MARGIN_STEP, MARGIN_BOUNDS[1])


class Pace:
    """Running means of requests' times on an engine."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._first = self._token = 0.0  # time to first token; per later token
        self._deviation = 0.0  # mean relative error of predicted times
        self._newest = -math.inf

    def add(self, claim: Claim[Any]) -> None:
        """Add a request's times."""
        state = claim.state
        steps = max(state.lengths, default=0) - 1
        if state.migrations or steps < 1 or state.first_time is None:
            return
        seconds = state.last_time - state.first_time
        if seconds <= 0:  # beam search returns its outputs at once
            return
        if self._clock() - self._newest > RECENT_SECONDS:
            self._count = 0
        self._newest = self._clock()
        self._count += 1
        share = 1 / min(self._count, MIN_SAMPLES)
        if self._count > 1:
            error = abs((state.last_time - claim.since) / self._mean(steps + 1) - 1)
            self._deviation += share * (error - self._deviation)
        self._first += share * (state.first_time - claim.since - self._first)
        self._token += share * (seconds / steps - self._token)

    def seconds(self, tokens: int, *, safe: bool = False) -> float | None:
        """Return the expected seconds for outputs of `tokens` tokens; None if unknown.

        Args:
            tokens: Length of the longest output.
            safe: Whether to return an upper bound for nearly all requests instead of the mean.
        """
        if self._count < MIN_SAMPLES or self._clock() - self._newest > RECENT_SECONDS:
            return None
        return self._mean(tokens) * (1 + SAFE_DEVIATIONS * self._deviation if safe else 1)

    def _mean(self, tokens: int) -> float:
        return self._first + self._token * (tokens - 1)
