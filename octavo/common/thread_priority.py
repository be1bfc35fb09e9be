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


def run_when_idle(task: int = 0) -> None:
    """Give a task the lowest priority: it runs only where no other thread wants the processor.

    With a priority that is merely low, a task that computes all the time still gets some
    milliseconds at once, by which a short step is a third longer. The change cannot be undone.

    Args:
        task: The native id of a thread; 0 is the calling one.
    """
    try:
        os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
    except ProcessLookupError:
        pass  # it has ended
    except (AttributeError, OSError) as error:  # not Linux, or forbidden by a sandbox
        log.warning("a background task has no lowest priority", error=str(error))
