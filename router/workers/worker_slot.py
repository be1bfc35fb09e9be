"""A worker of a router: its place among the others, and its share of the router's limits."""

from dataclasses import dataclass
from pathlib import Path

from octavo.router.settings import RouterSettings

DIVIDED = ("max_queue_size", "max_queue_tokens", "max_connections")
"""Limits of the whole router: each worker has its share of them."""


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A worker's place.

    Attributes:
        number: Number from 0; a worker that is started again keeps it.
        socket: Path of the Unix socket on which it serves its parent.
        parent: Path of the Unix socket on which its parent serves it.
        restarted: Whether it takes the place of one that ended.
    """

    number: int
    socket: Path
    parent: Path
    restarted: bool = False


def settings_of_worker(settings: RouterSettings, port: int) -> RouterSettings:
    """Return the settings of each worker of a router.

    Limits of the router are divided and rounded up; 0, which disables, stays. The parent serves
    metrics and AdminService.

    Args:
        settings: The router's settings.
        port: The port that its parent has reserved.
    """
    shares = {name: -(-getattr(settings, name) // settings.workers) for name in DIVIDED}
    return settings.model_copy(update={**shares, "port": port, "metrics_port": 0, "admin_port": 0})
