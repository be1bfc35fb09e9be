"""An engine process of `octavo serve`, or another rank of one, which ends when its parent ends."""

from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from octavo.cli.child_process import ChildProcess, Report, begin_child, run_child
from octavo.cli.engine import import_engine, run_engine, run_other_rank
from octavo.cli.running import settle
from octavo.common import logging
from octavo.common.placement import Placement, bind
from octavo.engine.settings import EngineSettings

OUT_OF_MEMORY = (
    "lower --cache-memory and --swap-space, use a smaller model, or give the container more memory"
)


class EngineProcess(ChildProcess):
    """Start an engine in a new process; stop it on exit.

    Args:
        settings: The engine's settings.
        socket: Path of the Unix socket to listen on. Default: the host and port of the settings.
        name: Name in errors, such as "the engine".
        placement: Cores and memory to use. Default: everything available.
    """

    def __init__(
        self,
        settings: EngineSettings,
        socket: Path | None = None,
        name: str = "the engine",
        placement: Placement | None = None,
    ) -> None:
        super().__init__(
            _run,
            (settings, socket, placement),
            name=name,
            process_name="octavo-engine",
            drain_timeout=settings.drain_timeout,
            remedy=OUT_OF_MEMORY,
        )
        self.socket = socket


class SpareEngine(ChildProcess):
    """An engine process that has imported its code, and waits for a model."""

    def __init__(self) -> None:
        self._orders_end, self._orders = Pipe(duplex=False)
        super().__init__(
            _wait,
            (self._orders_end,),
            name="the spare engine",
            process_name="octavo-engine",
            drain_timeout=0.0,
            remedy=OUT_OF_MEMORY,
        )

    def start(self) -> None:
        """Start the process; see `ChildProcess.start`."""
        super().start()
        self._orders_end.close()

    def serve(self, settings: EngineSettings, socket: Path, name: str) -> None:
        """Begin to serve a model; the arguments are those of `EngineProcess`."""
        self._name, self._drain_timeout = name, settings.drain_timeout
        self._orders.send((settings, socket))


def _run(
    settings: EngineSettings,
    socket: Path | None,
    placement: Placement | None,
    reports: Connection,
    parent: int,
) -> None:
    """Serve until SIGTERM in the child; report readiness or failure to the parent."""
    begin_child(parent)
    if placement is not None:  # before threads exist and PyTorch is imported
        bind(placement)
    _serve(settings, socket, reports)


def _wait(orders: Connection, reports: Connection, parent: int) -> None:
    """Import an engine's code in the child, and serve the model that comes."""
    begin_child(parent)
    import_engine()
    settings, socket = orders.recv()
    _serve(settings, socket, reports)


def _serve(settings: EngineSettings, socket: Path | None, reports: Connection) -> None:
    logging.configure(settings.log_format, settings.log_level)
    run_other_rank(settings)

    async def serve(report: Report) -> None:
        def ready(address: str) -> None:
            settle()
            report(address)

        await run_engine(settings, ready, socket)

    run_child(serve, reports, "engine failed")
