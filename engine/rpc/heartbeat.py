"""Send heartbeats while a step runs, and end the engine if a step exceeds its timeout."""

import asyncio
import faulthandler
import time
from collections.abc import Callable

import structlog

from octavo.engine.core import HEARTBEAT_SECONDS, EngineCore
from octavo.engine.embedding.core import EmbeddingCore
from octavo.v1.engine_pb2 import Load

log = structlog.get_logger(__name__)

Core = EngineCore | EmbeddingCore

CPU_STEP_TIMEOUT, GPU_STEP_TIMEOUT = 300.0, 120.0
SILENT_SECONDS = 1.5 * HEARTBEAT_SECONDS
"""Seconds without a report after which a step must be running: an idle core reports more often."""
LONG_SECONDS = 30.0
"""Seconds after which a running step is logged, at most half of its timeout."""


async def watch(
    core: Core, send: Callable[[Load], None], *, device: str, step_timeout: float | None
) -> None:
    """Send the load once a second while the core is silent, until cancelled.

    The core publishes nothing while a step runs. The event loop sends heartbeats meanwhile, so that
    routers do not mistake a long step for a hung engine. A step that exceeds `step_timeout` ends
    the process with exit code 1, after printing a traceback of every thread to stderr: a hung
    thread cannot be stopped, and prevents any other exit. The timer does not need Python's lock, so
    it also ends a process that never releases the lock.

    Args:
        core: The core to watch.
        send: Called with the load, which includes the running step's seconds.
        device: "cpu", or a GPU's name.
        step_timeout: Maximum seconds of a step; 0: no limit; None: the device's default.
    """
    if step_timeout is None:
        step_timeout = CPU_STEP_TIMEOUT if device == "cpu" else GPU_STEP_TIMEOUT
    reported = 0.0
    logged = False
    try:
        while True:
            if core.reported != reported:
                reported, logged = core.reported, False
                if step_timeout:  # an idle core reports before the first beat
                    limit = step_timeout + HEARTBEAT_SECONDS
                    faulthandler.dump_traceback_later(limit, exit=True)
            silence = time.monotonic() - reported
            if silence > SILENT_SECONDS:
                beat = Load(step_running_seconds=silence)
                beat.MergeFrom(core.load)
                send(beat)
            if silence >= min(LONG_SECONDS, step_timeout / 2 or LONG_SECONDS) and not logged:
                logged = True
                log.warning("step takes long", seconds=round(silence), limit=step_timeout)
            await asyncio.sleep(HEARTBEAT_SECONDS)
    finally:
        faulthandler.cancel_dump_traceback_later()
