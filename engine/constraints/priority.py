"""Give way to the threads that compute steps."""

import os
import threading

import structlog

log = structlog.get_logger(__name__)

NICENESS = 10
"""About a tenth of the processor time of a thread that computes, where both want the same core."""


def lower_priority() -> None:
    """Make the calling thread give way to the others, where the system can do it by thread."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except OSError as error:
        log.warning("background thread has no lower priority", error=str(error))
