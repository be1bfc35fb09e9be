"""Ends a rank when another rank is silent: dead, hung or cut off.

Once a second, all ranks join a collective in a separate group. A stopped process does not join, and
a dead one breaks its connections. Either way the other ranks end within the group's timeout, as
their next step would never end; the router then migrates the engine's requests.

In the same collective, ranks report stop signals. Rank 0 then drains, as if it got the signal.
"""

import os
import signal
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from octavo.common.background import start_thread
from octavo.engine.parallel.world import World

PERIOD_SECONDS = 1.0
GRACE_SECONDS = 1.0
"""Seconds that a rank waits for the stop message after another rank has left."""


class Watch:
    """Watches the other ranks from a thread until it is closed.

    Args:
        world: The ranks.
        stop_requested: Returns whether this rank got a stop signal.
    """

    def __init__(self, world: World, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self._world = world
        self._stop_requested = stop_requested
        self._closing = threading.Event()
        world.serving = True
        start_thread(self._run, "rank-watch")

    def close(self) -> None:
        """Stop watching: from now on, ranks may end."""
        self._world.serving = False
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_SECONDS):
            try:
                self._meet()
            except Exception as error:  # noqa: BLE001 - gloo raises several types
                if self._closing.wait(GRACE_SECONDS):
                    return
                self._world.end_engine(error)

    def _meet(self) -> None:
        """Wait for all ranks; if one got a stop signal, send it to rank 0."""
        requested = torch.tensor([int(self._stop_requested())])
        dist.all_reduce(requested, group=self._world.watch)
        if int(requested) and not self._world.place.rank:
            os.kill(os.getpid(), signal.SIGTERM)
