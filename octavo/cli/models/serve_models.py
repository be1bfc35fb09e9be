"""Runs the router of several models, and loads them on demand."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NoReturn

import structlog

from octavo.cli import preflight, running
from octavo.cli.models.catalog import CatalogModel
from octavo.cli.models.supervisor import Supervisor
from octavo.cli.run_router import import_router
from octavo.common.background import call_in_thread, end, joined, keep_running
from octavo.common.file_signature import FileWatch
from octavo.common.models import cache
from octavo.common.settings import SettingsError
from octavo.router.settings import RouterSettings

if TYPE_CHECKING:
    from octavo.router.server import Router

log = structlog.get_logger(__name__)

POLL_SECONDS = 1.0
"""Seconds between two looks at the file or directory of models."""


async def serve_models(
    settings: RouterSettings,
    read: Callable[[], Sequence[CatalogModel]],
    models: Sequence[CatalogModel],
    memory: int,
    file: FileWatch | None,
    progress: running.Progress,
    *,
    spare_engine: bool,
) -> None:
    """Run a router for the models of a catalog until a signal; then end their engines.

    Args:
        settings: The router's settings, without engines.
        read: Returns the models of the file or directory as it is now.
        models: The models at the start.
        memory: Maximum memory of all loaded models together, in bytes.
        file: Notices changes of the file or directory that they come from, if any.
        progress: Display of the start's stages.
        spare_engine: Whether an engine process without a model is kept ready.

    Raises:
        BackgroundError: An essential part stopped.
        OSError: A port is in use, or the cache is not writable.
    """
    preflight.check_router(settings)
    cache.check_usable()
    progress.stage("Starting the router")
    server = await call_in_thread(import_router)
    made: asyncio.Future[Router] = asyncio.get_running_loop().create_future()
    with TemporaryDirectory(prefix="octavo-") as directory:  # mode 0700
        supervisor = Supervisor(memory, Path(directory), spare_engine=spare_engine)
        supervisor.apply(models)

        async def supervise() -> None:
            if file is None:
                await supervisor.run((await made).pool)
                return
            reloading = keep_running(partial(_reload, file, read, supervisor), "models-file")
            try:
                await supervisor.run((await made).pool)
            finally:
                await end(reloading)

        serving = server.serve(
            settings,
            on_made=made.set_result,
            on_ready=partial(_announce, settings, models, memory, progress),
            on_demand=supervisor,
        )
        async with joined(serving, supervise(), names=("router", "models")) as works:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in done:
                work.result()


async def _reload(
    file: FileWatch, read: Callable[[], Sequence[CatalogModel]], supervisor: Supervisor
) -> NoReturn:
    """Offer the models again when their file or directory has changed; not if it is invalid."""
    while True:
        await asyncio.sleep(POLL_SECONDS)
        if not file.changed():
            continue
        try:
            models = await call_in_thread(read)
        except SettingsError as error:
            log.warning("models not reloaded", reason=str(error))
            continue
        supervisor.apply(models)
        log.info("models reloaded", models=[model.name for model in models])


def _announce(
    settings: RouterSettings,
    models: Sequence[CatalogModel],
    memory: int,
    progress: running.Progress,
    address: str,
) -> None:
    """Show the address and the models when requests are accepted."""
    facts = {
        "address": address,
        "models": ", ".join(model.name for model in models),
        "memory": f"{memory / 2**30:.1f} GiB",
    }
    if settings.serves_http:
        facts["http"] = settings.http_url
    progress.ready("octavo is ready", facts)
