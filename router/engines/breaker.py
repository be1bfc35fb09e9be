"""A circuit breaker: an engine that fails repeatedly is avoided for longer each time."""

import time
from collections.abc import Callable

PROBATION_SECONDS = 60.0
"""Seconds of use after which earlier failures are forgotten."""
FIRST_SECONDS = 0.5
MAX_SECONDS = 30.0


class CircuitBreaker:
    """Counts an engine's failures in a row, and opens for a time after each but the first.

    The first lost connection costs nothing, as a restart should not; the time doubles with each
    that follows before `PROBATION_SECONDS` of use, up to `MAX_SECONDS`. An open
    breaker says that others are to be preferred, not that the engine is gone:
    where there are no others, it is used.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._up_since = 0.0
        self._open_until = 0.0

    @property
    def remaining(self) -> float:
        """Seconds for which it is open yet; 0 if it is closed."""
        return max(self._open_until - self._clock(), 0.0)

    def connected(self) -> None:
        """Record that the engine can be used from now on."""
        self._up_since = self._clock()

    def fault(self) -> None:
        """Record that a step failed on the engine, which is still connected.

        It opens at the first fault, as an engine whose every step fails is idle and would be
        preferred for that.
        """
        self.trip(free=0)
        self._up_since = self._clock()  # its time of use starts again

    def trip(self, *, free: int = 1) -> None:
        """Record a failure of the engine; the first `free` in a row do not open the breaker."""
        now = self._clock()
        if now - self._up_since >= PROBATION_SECONDS:
            self._failures = 0
        self._failures += 1
        if self._failures > free:
            doublings = self._failures - free - 1
            self._open_until = now + min(FIRST_SECONDS * 2.0**doublings, MAX_SECONDS)
