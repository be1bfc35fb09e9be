"""Starts an engine's other ranks on this machine; if one ends, the engine ends."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import structlog

from octavo.common.background import start_thread
from octavo.common.shutdown import exit_at_once
from octavo.engine.parallel.meeting import STORE
from octavo.engine.parallel.place import Machines, RankError, RankPlace, place_from_launcher
from octavo.engine.parallel.world import current_world

MODULE = "octavo.engine.startup.follower"
STOP_SECONDS = 5.0
"""Seconds that ranks have to end after the stop message before they are killed."""
START_SECONDS = 5.0
"""Seconds that rank 0 has to report its own error when another rank fails at startup."""
LOOPBACK = "lo"
ONE_MACHINE = Machines()

log = structlog.get_logger(__name__)


class RankProcesses:
    """This machine's other ranks, as child processes.

    Args:
        places: Their places.
        settings: The engine's settings, as JSON.
    """

    def __init__(self, places: Sequence[RankPlace], settings: str) -> None:
        self._stopping = threading.Event()
        self._ready = threading.Event()
        self._children = [
            subprocess.Popen(
                [sys.executable, "-m", "octavo.common.parent_watch", MODULE, settings],
                stdin=subprocess.PIPE,
                start_new_session=True,
                env=os.environ | place.variables(),
            )
            for place in places
        ]
        for place, child in zip(places, self._children, strict=True):
            start_thread(partial(self._wait, place.rank, child), f"rank-{place.rank}")

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
    size: int, settings: str, machines: Machines = ONE_MACHINE
) -> Iterator[tuple[RankPlace | None, RankProcesses | None]]:
    """Start this machine's other ranks for a block, unless a launcher has; end them after it.

    Args:
        size: Number of ranks.
        settings: The engine's settings, as JSON.
        machines: The machines that the ranks are on.

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
        os.environ.update(machines.variables() or {STORE: str(Path(folder) / "store")})
        if (interface := _interface(machines)) is not None:
            for library in ("GLOO",) if machines.host is None else ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
        own, *others = machines.places(size)
        processes = RankProcesses(others, settings)
        try:
            yield own, processes
        except BaseException:
            processes.kill()
            raise
        processes.stop()


def _interface(machines: Machines) -> str | None:
    """Return the network interface by which ranks reach each other; None if it is unknown.

    Raises:
        RankError: Machine 0 cannot be reached.
    """
    if machines.host is None:
        return LOOPBACK if Path(f"/sys/class/net/{LOOPBACK}").exists() else None
    import psutil  # noqa: PLC0415 - in the servers' extras

    try:
        found = socket.getaddrinfo(machines.host, machines.port, type=socket.SOCK_DGRAM)
        family, *_, address = found[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
    except OSError as error:
        raise RankError(f"--master-addr {machines.host} cannot be reached: {error}") from error
    interfaces = psutil.net_if_addrs().items()
    named = (name for name, held in interfaces if own in {each.address for each in held})
    return next(named, None)
