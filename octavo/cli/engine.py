"""`octavo engine`: run one model replica."""

import os
from collections.abc import Callable
from pathlib import Path

from octavo.cli import running
from octavo.cli.extras import require
from octavo.cli.options import Flags, load, settings_options
from octavo.common import logging
from octavo.common.background import call_in_thread
from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.settings import EngineSettings


@settings_options(EngineSettings, positional="model")
def engine(flags: Flags) -> None:
    """Run an engine: one model with its paged KV cache, to which routers connect."""
    require("engine", "engine")
    settings = load(EngineSettings, flags)
    logging.configure(settings.log_format, settings.log_level)
    run_other_rank(settings)
    running.run(lambda progress: _engine(settings, progress), settings.log_format)


def run_other_rank(settings: EngineSettings) -> None:
    """If this process is a rank other than 0, run that; then end the process."""
    is_other = settings.node_rank or os.environ.get("RANK", "0") != "0"
    if settings.ranks > 1 and is_other:
        from octavo.engine.startup.follower import run  # noqa: PLC0415 - torch takes seconds

        run(settings)


async def _engine(settings: EngineSettings, progress: running.Progress) -> None:
    from octavo.cli.preflight import check_engine, check_model  # noqa: PLC0415 - in an extra

    check_engine(settings)
    progress.stage(f"Looking for {settings.model}")
    await call_in_thread(check_model, settings)
    progress.stage(f"Loading {settings.model}")

    def ready(address: str) -> None:
        progress.ready("engine is ready", {"address": address, "model": settings.model})

    await run_engine(settings, ready)


def import_engine() -> None:
    """Import what an engine without ranks needs on this machine, which takes seconds."""
    from octavo.engine.models.device import choose_device  # noqa: PLC0415 - torch takes seconds
    from octavo.engine.without_compiler import keep_compiler_out  # noqa: PLC0415

    try:
        device = choose_device("auto")
    except UnsupportedModelError:  # the engine that starts here reports it
        return
    if device.type == "cpu":
        keep_compiler_out()
        import octavo.engine.server  # noqa: F401, PLC0415


async def run_engine(
    settings: EngineSettings, on_ready: Callable[[str], None], socket: Path | None = None
) -> None:
    """Serve until SIGTERM, on a Unix socket if one is given.

    Raises:
        StartError: The settings do not fit together, the model or the machine.
    """
    from octavo.engine.models.device import choose_device  # noqa: PLC0415 - torch takes seconds
    from octavo.engine.without_compiler import keep_compiler_out  # noqa: PLC0415

    if settings.ranks == 1 and choose_device(settings.device).type == "cpu":
        keep_compiler_out()
    from octavo.engine.server import serve  # noqa: PLC0415 - torch takes seconds
    from octavo.engine.startup.capacity import StartupError  # noqa: PLC0415

    try:
        await serve(settings, on_ready=on_ready, socket=socket)
    except StartupError as error:
        raise running.StartError(str(error)) from error
