"""Run a worker of `octavo router --workers N` in a child process."""

from multiprocessing.connection import Connection

from octavo.cli.child_process import ChildProcess, Report, begin_child, run_child
from octavo.cli.run_router import connect_to_names
from octavo.cli.running import settle
from octavo.common import logging
from octavo.common.without_torch import keep_torch_out
from octavo.router.settings import RouterSettings
from octavo.router.workers.worker_slot import WorkerSlot

OUT_OF_MEMORY = "run fewer --workers, or give the container more memory"


class WorkerProcess(ChildProcess):
    """A worker, which reports when its parent can call it, and when it listens for clients.

    Args:
        settings: The worker's settings.
        slot: The worker's slot.
    """

    def __init__(self, settings: RouterSettings, slot: WorkerSlot) -> None:
        super().__init__(
            _run,
            (settings, slot),
            name=f"worker {slot.number}",
            process_name=f"octavo-worker-{slot.number}",
            drain_timeout=settings.drain_seconds,
            remedy=OUT_OF_MEMORY,
        )
        self.slot = slot


def _run(settings: RouterSettings, slot: WorkerSlot, reports: Connection, parent: int) -> None:
    """Serve until SIGTERM in the child; report the stages of the start, or its failure."""
    begin_child(parent)
    logging.configure(settings.log_format, settings.log_level, worker=slot.number)

    async def run(report: Report) -> None:
        keep_torch_out()
        await connect_to_names(settings)
        from octavo.router.workers.worker import serve  # noqa: PLC0415 - transformers takes seconds

        def ready(address: str) -> None:
            settle()
            report(address)

        await serve(settings, slot, on_reachable=lambda: report(""), on_ready=ready)

    run_child(run, reports, "worker failed")
