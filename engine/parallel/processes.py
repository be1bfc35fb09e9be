"""Starts an engine's other ranks on this machine; if one ends, the engine ends."""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import structlog

from octavo.common.background import start_thread
from octavo.common.shutdown import exit_at_once
from octavo.engine.parallel.place import RankPlace, place_from_launcher
from octavo.engine.parallel.world import STORE, current_world

MODULE = "octavo.engine.startup.follower"
STOP_SECONDS = 5.0
"""Seconds that ranks have to end after the stop message before they are killed."""
START_SECONDS = 5.0
"""Seconds that rank 0 has to report its own error when another rank fails at startup."""
LOOPBACK = "lo"

log = structlog.get_logger(__name__)


class RankProcesses:
    """The other ranks, as child processes.

    Args:
        size: Number of ranks, including this one.
        settings: The engine's settings, as JSON.
        folder: A directory that only this process uses.
    """

    def __init__(self, size: int, settings: str, folder: Path) -> None:
        self._stopping = threading.Event()
        self._ready = threading.Event()
        os.environ[STORE] = str(folder / "store")
        # Ranks on one machine need only loopback.
        if Path(f"/sys/class/net/{LOOPBACK}").exists():
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        self._children = [
            subprocess.Popen(
                [sys.executable, "-m", "octavo.common.parent_watch", MODULE, settings],
                stdin=subprocess.PIPE,
                start_new_session=True,
                env=os.environ | RankPlace(rank, size, rank, size).variables(),
            )
            for rank in range(1, size)
        ]
        for rank, child in enumerate(self._children, 1):
            start_thread(partial(self._wait, rank, child), f"rank-{rank}")

    def ready(self) -> None:
        """Record that the engine is ready: from now on no rank may end."""
        self._ready.set()

    def begin_to_stop(self) -> None:
        """Record that the ranks are about to end."""
        self._stopping.set()

    def stop(self) -> None:
        """Wait until the ranks have ended; kill those that do not."""
        self._stopping.set()
        for child in self._children:
            try:
                child.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                log.warning("a rank does not end: it is killed", pid=child.pid)
                child.kill()
                child.wait()

    def kill(self) -> None:
        """End the ranks at once."""
        self._stopping.set()
        for child in self._children:
            child.kill()
            child.wait()

    def _wait(self, rank: int, child: "subprocess.Popen[bytes]") -> None:
        """End the engine when a rank ends unexpectedly."""
        code = child.wait()
        if self._stopping.wait(0 if self._ready.is_set() else START_SECONDS):
            return
        world = current_world()
        why = None if world is None else world.failure()
        log.error("a rank ended by itself: the engine ends", rank=rank, exit_code=code, why=why)
        exit_at_once(1)


@contextmanager
def started_ranks(
    size: int, settings: str
) -> Iterator[tuple[RankPlace | None, RankProcesses | None]]:
    """Start the other ranks for a block, unless a launcher has; end them after it.

    Args:
        size: Number of ranks.
        settings: The engine's settings, as JSON.

    Yields:
        The place of this rank, None if it is alone; and the ranks that it started.

    Raises:
        RankError: A launcher's variables do not fit the setting.
    """
    if size == 1:
        yield None, None
        return
    if (place := place_from_launcher(os.environ, size)) is not None:
        yield place, None
        return
    with tempfile.TemporaryDirectory(prefix="octavo-ranks-") as folder:
        processes = RankProcesses(size, settings, Path(folder))
        try:
            yield RankPlace(0, size, 0, size), processes
        except BaseException:
            processes.kill()
            raise
        processes.stop()
