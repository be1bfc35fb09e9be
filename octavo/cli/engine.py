"""`octavo engine`: one model replica."""

from engine.config import EngineSettings
from octavo.cli import running
from octavo.cli.options import Flags, load, settings_options
from octavo.common import logging


@settings_options(EngineSettings)
def engine(flags: Flags) -> None:
    """Run an engine: one model with its paged KV cache, for routers to use."""
    settings = load(EngineSettings, flags)
    logging.configure(settings.log_format, settings.log_level)
    running.run(lambda progress: _engine(settings, progress), settings.log_format)


async def _engine(settings: EngineSettings, progress: running.Progress) -> None:
    """Serves, and shows a start that fails as a message."""
    progress.stage(f"Loading {settings.model}")
    from engine.server import serve  # noqa: PLC0415 - torch takes seconds
    from engine.startup import StartupError  # noqa: PLC0415

    def ready(address: str) -> None:
        progress.ready("engine is ready", {"address": address, "model": settings.model})

    try:
        await serve(settings, on_ready=ready)
    except StartupError as error:
        raise running.StartError(str(error)) from error
