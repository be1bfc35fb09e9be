"""A worker's slot: its number, its sockets, and its share of the router's limits."""

from dataclasses import dataclass
from pathlib import Path

from octavo.router.settings import RouterSettings

DIVIDED = ("max_queue_size", "max_queue_tokens", "max_connections")
"""Limits of the whole router, divided among the workers."""


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """A worker's place.

    Attributes:
        number: Number from 0; a restarted worker keeps it.
        socket: Path of the Unix socket on which the worker serves its parent.
        parent: Path of the Unix socket on which the parent serves the worker.
        restarted: Whether the worker replaces an ended one.
    """

    number: int
    socket: Path
    parent: Path
    restarted: bool = False


def settings_of_worker(settings: RouterSettings, port: int, directory: Path) -> RouterSettings:
    """Return the settings of each worker.

    Limits are divided among workers and rounded up; 0 stays 0. The parent serves metrics and
    AdminService.

    Args:
        settings: The router's settings.
        port: Port that the parent has reserved.
        directory: The parent's directory, where workers share what others keep in memory.
    """
    shares = {name: -(-getattr(settings, name) // settings.workers) for name in DIVIDED}
    own = {"port": port, "metrics_port": 0, "admin_port": 0}
    store = settings.response_store or directory / "responses.sqlite"
    return settings.model_copy(update={**shares, **own, "response_store": store})
