"""How long an engine that was lost stays out of use: longer each time that it soon fails again."""

import time
from collections.abc import Callable

PROBATION_SECONDS = 60.0
"""An engine that was in use for this long is as good as one that never failed."""
FIRST_SECONDS = 0.5
MAX_SECONDS = 10.0
"""Little enough that the only engine of a model is not missed for long."""


class CircuitBreaker:
    """Counts an engine's failures in a row.

    The first costs nothing, as a restart should not; each that follows before
    `PROBATION_SECONDS` of use doubles the time out, up to `MAX_SECONDS`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._closed_at = 0.0

    def close(self) -> None:
        """The engine is in use from now on."""
        self._closed_at = self._clock()

    def trip(self) -> float:
        """The engine failed while in use.

        Returns:
            Seconds to keep it out of use.
        """
        if self._clock() - self._closed_at >= PROBATION_SECONDS:
            self._failures = 0
        self._failures += 1
        if self._failures == 1:
            return 0.0
        return min(FIRST_SECONDS * 2.0 ** (self._failures - 2), MAX_SECONDS)
