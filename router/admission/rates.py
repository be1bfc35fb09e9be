"""Recent rates: how fast requests leave the queue, and how fast engines serve them."""

import math
import time
from collections.abc import Callable
from typing import Any

from octavo.router.admission.claims import Claim
from octavo.router.admission.output_lengths import MIN_SAMPLES

Clock = Callable[[], float]

RECENT_SECONDS = 15.0
"""Time constant of averages; measurements older than this are dropped if none is newer."""
SAFE_DEVIATIONS = 2.0
"""Mean deviations above the mean that 19 of 20 requests stay below, were they normally
distributed. The estimator is that of TCP's timeouts (Jacobson, SIGCOMM 1988)."""
MARGIN_BOUNDS = (1.25, 4.0)
"""Minimum and maximum of `Margin`."""
MARGIN_STEP = 0.25
"""Increase of `Margin` for each request that its deadline removed from the queue."""
ALLOWED_MISSES = 0.002
"""Share of queued requests that their deadlines may remove."""


class DrainRate:
    """Tokens that leave a queue per second, measured only while requests wait.

    At other times it is the clients who set the pace, not the engines.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._since: float | None = None  # up to when it is accounted for, while anybody waits
        self._tokens = self._seconds = 0.0
        self._requests = 0.0

    def begin(self) -> None:
        """Start measuring: a request waits."""
        if self._since is None:
            self._since = self._clock()

    def end(self) -> None:
        """Stop measuring: no request waits."""
        self._pass_time()
        self._since = None

    def add(self, tokens: int) -> None:
        """Record that a request of `tokens` expected tokens left the queue for an engine."""
        self._pass_time()
        self._tokens += tokens
        self._requests += 1

    def per_second(self) -> float | None:
        """Return the rate in tokens, or None after too few requests."""
        self._pass_time()
        if self._requests < MIN_SAMPLES or not self._seconds:
            return None
        return self._tokens / self._seconds

    def _pass_time(self) -> None:
        if self._since is None:
            return
        now = self._clock()
        passed, self._since = now - self._since, now
        kept = math.exp(-passed / RECENT_SECONDS)
        self._tokens *= kept
        self._requests *= kept
        self._seconds = self._seconds * kept + passed


class Margin:
    """The factor on estimated waits that lets nearly all admitted requests meet their deadlines.

    It follows a quantile of true waits over estimated ones by what it does itself: each
    who had to leave a queue for his deadline raises it, and each who was served lowers
    it, in the proportion that is allowed (Robbins and Monro, 1951). An engine whose
    pace varies so has a shorter queue than a steady one.
    """

    def __init__(self) -> None:
        self.value = MARGIN_BOUNDS[0]

    def kept(self) -> None:
        """Record that a request that waited was served."""
        self.value = max(self.value - MARGIN_STEP * ALLOWED_MISSES, MARGIN_BOUNDS[0])

    def missed(self) -> None:
        """Record that a request that waited could no longer be served in time."""
        self.value = min(self.value + MARGIN_STEP, MARGIN_BOUNDS[1])


class Pace:
    """Running means of the time that requests take on an engine."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._count = 0
        self._first = self._token = 0.0  # seconds to the first token, and for each further one
        self._deviation = 0.0  # of whole requests from what was foretold, as a share of that
        self._newest = -math.inf

    def add(self, claim: Claim[Any]) -> None:
        """Record how long a request took."""
        state = claim.state
        steps = max(state.lengths, default=0) - 1
        if claim.migrated or steps < 1 or state.first_time is None:
            return
        seconds = state.last_time - state.first_time
        if seconds <= 0:  # a search's outputs come whole
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
        """Return how long outputs of `tokens` tokens take on an engine; None if unknown.

        Args:
            tokens: Tokens of the longest output.
            safe: Whether it is to be more than nearly all requests take, in place
                of the mean.
        """
        if self._count < MIN_SAMPLES or self._clock() - self._newest > RECENT_SECONDS:
            return None
        return self._mean(tokens) * (1 + SAFE_DEVIATIONS * self._deviation if safe else 1)

    def _mean(self, tokens: int) -> float:
        return self._first + self._token * (tokens - 1)
