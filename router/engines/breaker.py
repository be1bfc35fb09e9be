"""A circuit breaker: an engine that fails repeatedly is avoided for longer each time."""

import time
from collections.abc import Callable

PROBATION_SECONDS = 60.0
"""Seconds without failure after which earlier failures are forgotten."""
FIRST_SECONDS = 0.5
MAX_SECONDS = 30.0


class CircuitBreaker:
    """Count an engine's consecutive failures; open for a while after each but the first.

    The first lost connection does not open it, so that a restart is not punished. The time doubles
    with each further failure within `PROBATION_SECONDS` of use, up to `MAX_SECONDS`. While it is
    open, other engines are preferred; without others, the engine is still used.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._up_since = 0.0
        self._open_until = 0.0

    @property
    def remaining(self) -> float:
        """Seconds until the breaker closes; 0 if it is closed."""
        return max(self._open_until - self._clock(), 0.0)

    def connected(self) -> None:
        """Record that the engine is usable from now on."""
        self._up_since = self._clock()

    def fault(self) -> None:
        """Record a failed step of an engine that is still connected.

        Open at the first one: an engine whose steps all fail is idle, so balancing would prefer it.
        """
        self.trip(free=0)
        self._up_since = self._clock()  # restarts its probation

    def trip(self, *, free: int = 1) -> None:
        """Record a failure; the first `free` consecutive failures do not open the breaker."""
        now = self._clock()
        if now - self._up_since >= PROBATION_SECONDS:
            self._failures = 0
        self._failures += 1
        if self._failures > free:
            doublings = self._failures - free - 1
            self._open_until = now + min(FIRST_SECONDS * 2.0**doublings, MAX_SECONDS)
