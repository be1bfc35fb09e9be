"""Runs the router of `octavo serve`, from before its engines are ready."""

import asyncio
import importlib
from collections.abc import Callable, Coroutine
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import structlog

from octavo.cli import running
from octavo.common.background import call_in_thread, end, joined, report_failure
from octavo.common.without_torch import keep_torch_out
from octavo.router.settings import RAY_SCHEME, RouterSettings
from octavo.v1 import generation_pb2

if TYPE_CHECKING:
    from octavo.router.server import Router

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 60.0
"""Seconds for the router to connect to the engine before a warning."""


async def connect_to_names(settings: RouterSettings) -> None:
    """Connect to the Ray cluster of the router's engines, if any; before signals are handled.

    Raises:
        StartError: There is no cluster.
    """
    if not any(engine.startswith(RAY_SCHEME) for engine in settings.engine):
        return
    from octavo.ray.cluster import RayError, connect  # noqa: PLC0415 - of an extra

    try:
        await call_in_thread(connect)
    except RayError as error:
        raise running.StartError(str(error)) from error


async def run_router(
    router: RouterSettings,
    tokenizer: str,
    ready: asyncio.Task[None],
    work: Callable[[], Coroutine[Any, Any, None]],
    progress: running.Progress,
    on_made: "Callable[[Router], None] | None" = None,
) -> None:
    """Run the router until a signal, an error, or the end of `work`.

    Args:
        router: Its settings.
        tokenizer: The tokenizer to load.
        ready: Task that ends when the engines are ready.
        work: Coroutine function to run concurrently; its error is raised.
        progress: Display of the start's stages.
        on_made: Called with the router before it starts.
    """
    # Start the router while the model loads: its imports take seconds, and a taken port is
    # reported at once.
    server = await call_in_thread(import_router)
    loop = asyncio.get_running_loop()
    served: asyncio.Future[generation_pb2.ModelCard] = loop.create_future()
    listening: asyncio.Future[str] = loop.create_future()
    announcing = report_failure(
        partial(_announce, ready, listening, served, router, progress), "announce"
    )
    try:
        async with joined(
            server.serve(
                router,
                on_made=on_made,
                on_ready=listening.set_result,
                on_serving=served.set_result,
                engines_ready=ready,
                tokenizer=tokenizer,
            ),
            work(),
            names=("router", "engines"),
        ) as (serving, working):
            await asyncio.wait({serving, working}, return_when=asyncio.FIRST_COMPLETED)
            if not serving.done():
                await working
            await serving
    finally:
        await end(announcing)


def import_router() -> ModuleType:
    """Import the router and the tokenizer loader, both without PyTorch."""
    keep_torch_out()
    importlib.import_module("transformers.models.auto.tokenization_auto")
    return importlib.import_module("octavo.router.server")


async def _announce(
    ready: asyncio.Task[None],
    listening: asyncio.Future[str],
    served: asyncio.Future[generation_pb2.ModelCard],
    router: RouterSettings,
    progress: running.Progress,
) -> None:
    """Show the address and model when requests are accepted."""
    address = await listening
    await asyncio.wait({ready})
    if ready.cancelled() or ready.exception() is not None:
        return
    progress.stage("Connecting the router")
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            model = await asyncio.shield(served)
    except TimeoutError:
        log.warning("no engine connected to the router yet", address=address)
        return
    facts = {
        "address": address,
        "model": model.name,
        "context": f"{model.max_model_len} tokens",
        "blocks": f"{model.total_blocks} of {model.block_size} tokens",
    }
    if model.engines > 1:
        facts["engines"] = str(model.engines)
    if router.serves_http:
        facts["http"] = router.http_url
    progress.ready("octavo is ready", facts)
