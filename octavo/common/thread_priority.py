"""Lower priorities for threads other than those that compute steps."""

import os
import threading

import structlog

log = structlog.get_logger(__name__)

NICENESS = 10
"""Nice value with about a tenth of a computing thread's CPU time on a shared core."""


def lower_priority() -> None:
    """Lower the calling thread's priority, if the system supports it per thread."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except OSError as error:
        log.warning("could not lower a background thread's priority", error=str(error))


def run_when_idle(task: int = 0) -> None:
    """Give a task idle priority: it runs only if no other thread wants the CPU.

    With a merely low priority, a busy task still gets milliseconds at a time, which makes a short
    step a third longer. The change cannot be undone.

    Args:
        task: Native id of a thread; 0: the calling one.
    """
    try:
        os.sched_setscheduler(task, os.SCHED_IDLE, os.sched_param(0))
    except ProcessLookupError:
        pass  # the task has ended
    except (AttributeError, OSError) as error:  # not Linux, or forbidden by a sandbox
        log.warning("could not set a background task to idle priority", error=str(error))
