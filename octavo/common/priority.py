"""The order of requests by priority and waiting time, in routers' and engines' queues."""

PRIORITY_SECONDS = 10.0
"""Seconds of waiting that one unit of priority is worth."""


def effective_arrival(arrival: float, priority: int) -> float:
    """Return when a request counts as having arrived; queues serve the earliest first.

    Within one priority the order is first come, first served; a higher priority goes first; a
    request that has waited long enough goes before any new one.
    """
    return arrival - priority * PRIORITY_SECONDS
