"""The worker processes of `octavo router --workers N`: started, restarted, drained."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc.aio
import structlog

from octavo.cli.child_process import STOP_SECONDS
from octavo.cli.running import StartError
from octavo.cli.worker_process import WorkerProcess
from octavo.common.background import end, joined, restart_delays, start
from octavo.common.ports import Listener
from octavo.common.shutdown import ShutdownSignals, StoppedWhileStartingError, shutdown_signals
from octavo.router.http.responses.store import ResponseStore
from octavo.router.settings import RouterSettings, http_listener
from octavo.router.workers.parent_server import ParentServer
from octavo.router.workers.worker_slot import WorkerSlot, settings_of_worker

log = structlog.get_logger(__name__)


class WorkerGroup:
    """The workers of one router, each in a process that is restarted when it ends.

    Args:
        settings: Settings of each worker.
        directory: Directory of the Unix sockets.
        parent: The servers in this process.
        socket: Path of the parent's Unix socket.
    """

    def __init__(
        self, settings: RouterSettings, directory: Path, parent: ParentServer, socket: Path
    ) -> None:
        self._settings = settings
        self._directory = directory
        self._parent = parent
        self._socket = socket
        self._starts = 0
        self._stopping = asyncio.Event()
        self._listening: list[asyncio.Future[str]] = []
        self._processes: list[WorkerProcess] = []
        self._tasks: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._processes)

    @property
    def is_up(self) -> bool:
        """Whether every worker has been ready for clients at least once."""
        return all(address.done() for address in self._listening)

    def start(self) -> None:
        """Start all processes; call it before gRPC is used, as a fork loses its threads."""
        loop = asyncio.get_running_loop()
        numbers = range(self._settings.workers)
        self._listening = [loop.create_future() for _ in numbers]
        for number in numbers:
            self._processes.append(self._new_process(number, restarted=False))

    async def listening(self) -> str:
        """Wait until all workers listen for clients; return HOST:PORT."""
        addresses = await asyncio.gather(*map(asyncio.shield, self._listening))
        return addresses[0]

    async def keep(self) -> None:
        """Keep all workers running until `drain`.

        Raises:
            StartError: A worker cannot start.
        """
        self._tasks = [
            start(self._keep(number), f"worker-{number}") for number in range(len(self._processes))
        ]
        await asyncio.gather(*map(asyncio.shield, self._tasks))

    async def drain(self) -> None:
        """Drain all workers and wait for their end; kill them after the timeout."""
        self._stopping.set()
        self._begin_to_stop()
        await asyncio.wait(self._tasks, timeout=self._settings.drain_seconds + STOP_SECONDS)

    def hurry(self) -> None:
        """Stop draining workers at once, with a second signal."""
        self._begin_to_stop()

    async def close(self) -> None:
        """Stop all processes at once."""
        self._stopping.set()
        for process in self._processes:
            process.kill()
        await end(*self._tasks)

    def _begin_to_stop(self) -> None:
        for process in self._processes:
            process.begin_to_stop()

    def _new_process(self, number: int, *, restarted: bool) -> WorkerProcess:
        self._starts += 1  # a restarted worker uses a new socket
        socket = self._directory / f"{number}-{self._starts}.sock"
        slot = WorkerSlot(number, socket, self._socket, restarted)
        process = WorkerProcess(self._settings, slot)
        process.start()
        return process

    async def _keep(self, number: int) -> None:
        """Wait for a worker's end and restart it, until all are stopped.

        Raises:
            StartError: The worker could not start the first time.
        """
        delays = restart_delays()
        while not self._stopping.is_set():
            process = self._processes[number]
            why = await self._serve(process)
            if self._stopping.is_set():
                return
            delay = next(delays)
            log.error("worker ended", worker=number, reason=why, restart_seconds=delay)
            self._parent.restarts()
            try:
                async with asyncio.timeout(delay):
                    await self._stopping.wait()
            except TimeoutError:
                self._processes[number] = self._new_process(number, restarted=True)

    async def _serve(self, process: WorkerProcess) -> str:
        """Bring a new process into service and wait for its end; return why it ended.

        Raises:
            StartError: The worker could not start the first time.
        """
        slot, served = process.slot, False
        try:
            await process.report()
            await self._parent.join(slot)
            address = await process.ready()
            self._parent.serves()
            served = True
            log.info("worker up", worker=slot.number, pid=process.pid)
            if not self._listening[slot.number].done():
                self._listening[slot.number].set_result(address)
            await process.ended()
        except (StartError, grpc.aio.AioRpcError) as error:
            if isinstance(error, StartError) and not slot.restarted and not self._stopping.is_set():
                raise
            return str(error)
        finally:
            process.kill()
            await self._parent.leave(slot.number, served=served)
        return process.end()


async def run_workers(settings: RouterSettings, on_ready: Callable[[str], None]) -> None:
    """Run a router's workers until SIGTERM or SIGINT, then drain; a second signal stops at once.

    Args:
        settings: The router's settings.
        on_ready: Called with HOST:PORT when all workers listen.

    Raises:
        BackgroundError: An essential part of the router stopped.
        OSError: An address is in use, or not local to this machine.
        SettingsError: The tenants' file cannot be used.
        StartError: A worker cannot start.
        StoppedWhileStartingError: A signal arrived before all workers listened.
        TlsError: Certificates or keys cannot be used.
    """
    if sys.platform != "linux":
        raise StartError("--workers above 1 needs Linux, which spreads connections over them")
    with (
        TemporaryDirectory(prefix="octavo-") as name,  # mode 0700
        _reserved(settings) as port,
        shutdown_signals() as signals,
    ):
        directory = Path(name)
        socket = directory / "parent.sock"
        parent = ParentServer(settings, socket)
        own = settings_of_worker(settings, port, directory)
        if settings.serves_http:  # workers that made the file at once could lock each other out
            await ResponseStore(own.response_store, own.response_store_space).close()
        group = WorkerGroup(own, directory, parent, socket)
        try:
            group.start()
            await parent.start()
            await _run(group, parent, signals, on_ready)
        finally:
            await group.close()
            await parent.stop()


async def _run(
    group: WorkerGroup,
    parent: ParentServer,
    signals: ShutdownSignals,
    on_ready: Callable[[str], None],
) -> None:
    """Serve until the first signal, then drain.

    Raises:
        Exception: Any error of `run_workers`.
    """

    async def announce() -> None:
        address = await group.listening()
        parent.warn(address)
        on_ready(address)
        await asyncio.Event().wait()

    works = signals.first.wait(), parent.ended(), group.keep(), announce()
    async with joined(*works, names=("signal", "parts", "workers", "announce")) as tasks:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if not group.is_up:
            raise StoppedWhileStartingError(signals.came[0])
        log.info("router draining", workers=len(group))
        async with joined(signals.second.wait(), group.drain(), names=("hurry", "drain")) as ending:
            await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
            if signals.second.is_set():
                group.hurry()
                await ending[1]
    log.info("router stopped")


@contextmanager
def _reserved(settings: RouterSettings) -> Iterator[int]:
    """Reserve the workers' shared ports within a block; yield the gRPC port.

    Raises:
        OSError: A port is in use.
    """
    with Listener(settings.host, settings.port).reserve() as reserved:
        port = int(reserved.getsockname()[1])
        if not settings.http_port:
            yield port
            return
        with http_listener(settings.http_host, settings.http_port).reserve():
            yield port
