"""Order of requests by priority and waiting time, in routers' and engines' queues."""

PRIORITY_SECONDS = 10.0
"""Seconds of waiting that equal one unit of priority."""


def effective_arrival(arrival: float, priority: int) -> float:
    """Return a request's effective arrival time; queues serve the earliest first.

    Higher priorities are served first, equal ones in order of arrival; a request that has waited
    long enough is served before any new one.
    """
    return arrival - priority * PRIORITY_SECONDS
