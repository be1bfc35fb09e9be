"""Runs the router of several models, and loads them on demand."""

import asyncio
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from octavo.cli import preflight, running
from octavo.cli.models.catalog import Catalog
from octavo.cli.models.supervisor import Supervisor
from octavo.cli.run_router import import_router
from octavo.common.background import call_in_thread, joined
from octavo.common.models import cache
from octavo.router.settings import RouterSettings

if TYPE_CHECKING:
    from octavo.router.server import Router


async def serve_models(
    settings: RouterSettings, catalog: Catalog, progress: running.Progress
) -> None:
    """Run a router for the models of a catalog until a signal; then end their engines.

    Args:
        settings: The router's settings, without engines.
        catalog: The models.
        progress: Display of the start's stages.

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
        supervisor = Supervisor(catalog.models, catalog.memory, Path(directory))

        async def supervise() -> None:
            await supervisor.run((await made).pool)

        serving = server.serve(
            settings,
            on_made=made.set_result,
            on_ready=partial(_announce, settings, catalog, progress),
            on_demand=supervisor,
        )
        async with joined(serving, supervise(), names=("router", "models")) as works:
            done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            for work in done:
                work.result()


def _announce(
    settings: RouterSettings, catalog: Catalog, progress: running.Progress, address: str
) -> None:
    """Show the address and the models when requests are accepted."""
    facts = {
        "address": address,
        "models": ", ".join(model.name for model in catalog.models),
        "memory": f"{catalog.memory / 2**30:.1f} GiB",
    }
    if settings.serves_http:
        facts["http"] = settings.http_url
    progress.ready("octavo is ready", facts)
