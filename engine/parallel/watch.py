"""Ends a rank when another is silent: it died, hangs or is cut off.

Once a second all ranks meet in a collective of a group of its own. A rank whose process is stopped
does not come, and one that died breaks its connections. Either ends the others within the group's
timeout, as their next step would never end. The engine's router then moves its requests.

In the same collective a rank reports a signal to stop. Rank 0 then acts as if it got it: it drains.
"""

import os
import signal
import threading
from collections.abc import Callable

import structlog
import torch
import torch.distributed as dist

from octavo.common.background import start_thread
from octavo.common.stopping import exit_at_once
from octavo.engine.parallel.world import World

PERIOD_SECONDS = 1.0
GRACE_SECONDS = 1.0
"""Seconds that a rank waits, when another has left, for the message that they all stop."""
EXIT_CODE = 1

log = structlog.get_logger(__name__)


class Watch:
    """Watches the other ranks from a thread until it is closed.

    Args:
        world: The ranks.
        stop_requested: Returns whether this rank got a signal to stop.
    """

    def __init__(self, world: World, stop_requested: Callable[[], bool] = lambda: False) -> None:
        self._world = world
        self._stop_requested = stop_requested
        self._closing = threading.Event()
        start_thread(self._run, "rank-watch")

    def close(self) -> None:
        """Stop watching: from now on, ranks may end."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.wait(PERIOD_SECONDS):
            try:
                self._meet()
            except Exception as error:  # noqa: BLE001 - gloo raises several types
                if self._closing.wait(GRACE_SECONDS):
                    return
                log.error(  # noqa: TRY400 - the traceback adds nothing
                    "another rank died, hangs or is cut off: the engine ends",
                    rank=self._world.rank,
                    error=str(error).splitlines()[0],
                )
                exit_at_once(EXIT_CODE)

    def _meet(self) -> None:
        """Wait for all ranks; if one got a signal to stop, send it to rank 0."""
        requested = torch.tensor([int(self._stop_requested())])
        dist.all_reduce(requested, group=self._world.watch)
        if int(requested) and not self._world.rank:
            os.kill(os.getpid(), signal.SIGTERM)
