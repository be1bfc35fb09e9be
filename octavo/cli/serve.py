"""`octavo serve`: run a router and an engine together."""

import asyncio
import importlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import TYPE_CHECKING

import structlog
import typer

from octavo.cli import running
from octavo.cli.extras import require
from octavo.cli.options import Flags, load, settings_options
from octavo.common import logging
from octavo.common.background import call_in_thread, end, joined, report_failure, start
from octavo.common.ports import Listener, metrics_listener
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings
from octavo.v1 import generation_pb2

if TYPE_CHECKING:
    from octavo.cli.engine_process import EngineProcess

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 60.0
"""Seconds for the router to connect to the engine before a warning."""

LAST_PORT = 65535

LINK_TO_ENGINE = ("engine_ca", "engine_cert", "engine_key", "engine_tls_name")
PORT_OF_ENGINE = ("tls_cert", "tls_key", "tls_client_ca")
"""TLS settings between router and engine; unused on a Unix socket."""


HIDDEN = frozenset({"engine", *LINK_TO_ENGINE})
"""Settings of the router that have no option here: there is one engine, at a Unix socket."""


@settings_options(RouterSettings, EngineSettings, hidden=HIDDEN, positional="model")
def serve(flags: Flags) -> None:
    """Serve a model: a router here and an engine in a child process.

    --host, --port, --metrics-port, --max-message-bytes and --tls-... set the router. The engine
    listens on a Unix socket of this user only; its metrics port is the router's plus one.
    MODEL is a Hub name, a local directory, a GGUF file or `demo`.
    """
    require("serve", "engine", "router")
    router = load(RouterSettings, {**flags, "engine": ["127.0.0.1:50052"]})
    own: Flags = {"host": "127.0.0.1"}
    # If it is not set, each picks a free port where its default is taken.
    if "metrics_port" in router.model_fields_set:
        own["metrics_port"] = _metrics_port_of_engine(router.metrics_port)
    engine = load(EngineSettings, {**_without(flags, "max_message_bytes"), **own})
    logging.configure(router.log_format, router.log_level)
    router = router.model_copy(update=dict.fromkeys(LINK_TO_ENGINE))
    engine = engine.model_copy(update=dict.fromkeys(PORT_OF_ENGINE))
    running.run(
        lambda progress: running.unless_stopped(_serve(router, engine, progress)),
        router.log_format,
    )


def _metrics_port_of_engine(port: int) -> int:
    """Return the engine's metrics port, by the router's; 0 disables both.

    Raises:
        typer.BadParameter: There is no port after the router's.
    """
    if port == LAST_PORT:
        raise typer.BadParameter(
            f"--metrics-port is {port}, but the engine's metrics need the next port, and there is "
            "none: choose a lower port, or 0 for no metrics"
        )
    return port + 1 if port else 0


def _listener_of_engine(router: RouterSettings, engine: EngineSettings) -> list[Listener]:
    """Return where the engine serves metrics, if its port is not replaced when it is taken."""
    if "metrics_port" not in engine.model_fields_set:
        return []
    listener = metrics_listener(engine.host, engine.metrics_port)
    reason = f"it is the port after --metrics-port {router.metrics_port}, and the engine's"
    return [replace(listener, action="serve the engine's metrics", reason=reason)]


def _without(flags: Flags, name: str) -> Flags:
    """Return the flags without one."""
    return {key: value for key, value in flags.items() if key != name}


async def _serve(
    router: RouterSettings, engine: EngineSettings, progress: running.Progress
) -> None:
    """Run router and engine; stop the router before the engine."""
    from octavo.cli import preflight  # noqa: PLC0415 - of the extras, as the next two
    from octavo.cli.engine_process import EngineProcess  # noqa: PLC0415
    from octavo.common.models import cache  # noqa: PLC0415

    preflight.check_router(router, _listener_of_engine(router, engine))
    cache.check_usable()
    progress.stage(f"Looking for {engine.model}")
    model = await call_in_thread(preflight.check_model, engine.model)
    await call_in_thread(preflight.check_tokenizer, router.tokenizer or str(model))
    progress.stage(f"Loading {engine.model}")
    with (
        TemporaryDirectory(prefix="octavo-") as directory,  # of mode 0700
        EngineProcess(engine, socket := Path(directory, "engine.sock")) as process,
    ):
        # Start the router while the model loads: its imports take seconds, and a taken port is
        # reported at once.
        server = await call_in_thread(_import_router)
        loop = asyncio.get_running_loop()
        served: asyncio.Future[generation_pb2.ModelCard] = loop.create_future()
        listening: asyncio.Future[str] = loop.create_future()
        ready = start(process.ready(), "engine-ready")
        announcing = report_failure(
            partial(_announce, ready, listening, served, router, progress), "announce"
        )
        try:
            async with joined(
                server.serve(
                    router.model_copy(update={"engine": [f"unix:{socket}"]}),
                    on_ready=listening.set_result,
                    on_serving=served.set_result,
                    engines_ready=ready,
                    tokenizer=router.tokenizer or engine.model,
                ),
                _end_of(process, ready),
                names=("router", "engine"),
            ) as (serving, ended):
                await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    process.check()
                await serving
        finally:
            await end(announcing, ready)


async def _end_of(process: "EngineProcess", ready: asyncio.Task[str]) -> None:
    """Wait until a ready engine ends; the router reports a failed start."""
    await asyncio.wait({ready})
    if not ready.cancelled() and ready.exception() is None:
        await process.ended()
    else:
        await asyncio.Event().wait()


def _import_router() -> ModuleType:
    """Import the router and the tokenizer loader."""
    importlib.import_module("transformers.models.auto.tokenization_auto")
    return importlib.import_module("octavo.router.server")


async def _announce(
    ready: asyncio.Task[str],
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
    if router.http_port:
        facts["http"] = router.http_url
    progress.ready("octavo is ready", facts)
