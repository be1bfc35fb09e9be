"""`octavo router`: run the server that clients connect to."""

from octavo.cli import running
from octavo.cli.extras import require
from octavo.cli.options import Flags, load, settings_options
from octavo.cli.run_router import connect_to_names
from octavo.common import logging
from octavo.common.background import call_in_thread
from octavo.common.without_torch import keep_torch_out
from octavo.router.settings import RAY_SCHEME, RouterSettings


@settings_options(RouterSettings)
def router(flags: Flags) -> None:
    """Run a router: accept requests from clients and balance them over engines."""
    require("router", "router")
    settings = load(RouterSettings, flags)
    if any(engine.startswith(RAY_SCHEME) for engine in settings.engine):
        require(f"router --engine {RAY_SCHEME}", "ray")
    logging.configure(settings.log_format, settings.log_level)
    running.run(lambda progress: _router(settings, progress), settings.log_format)


async def _router(settings: RouterSettings, progress: running.Progress) -> None:
    from octavo.cli.preflight import check_router, check_tokenizer  # noqa: PLC0415 - in an extra

    check_router(settings)
    if settings.tokenizer is not None:
        progress.stage(f"Looking for the tokenizer {settings.tokenizer}")
        await call_in_thread(check_tokenizer, settings.tokenizer)
    progress.stage("Starting the router")

    def ready(address: str) -> None:
        facts = {"address": address, "engines": ", ".join(settings.engine)}
        if settings.workers > 1:
            facts["workers"] = str(settings.workers)
        if settings.serves_http:
            facts["http"] = settings.http_url
        progress.ready("router is ready", facts)

    if settings.workers > 1:
        from octavo.cli.worker_group import run_workers  # noqa: PLC0415 - in an extra

        await run_workers(settings, ready)
        return
    keep_torch_out()
    await connect_to_names(settings)
    from octavo.router.server import serve  # noqa: PLC0415 - transformers takes seconds

    await serve(settings, on_ready=ready)
