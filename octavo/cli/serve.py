"""`octavo serve`: run a router and its engines together."""

import asyncio
import importlib
from collections.abc import Sequence
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
from octavo.cli.serve_settings import ServeSettings, Words
from octavo.common import logging
from octavo.common.background import call_in_thread, end, joined, report_failure, start
from octavo.common.ports import Listener, check_all, metrics_listener
from octavo.common.without_torch import keep_torch_out
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings
from octavo.v1 import generation_pb2

if TYPE_CHECKING:
    from octavo.cli.engine_group import EngineGroup

log = structlog.get_logger(__name__)

CONNECT_SECONDS = 60.0
"""Seconds for the router to connect to the engine before a warning."""

LAST_PORT = 65535

LINK_TO_ENGINE = ("engine_ca", "engine_cert", "engine_key", "engine_tls_name")
PORT_OF_ENGINE = ("tls_cert", "tls_key", "tls_client_ca")
"""TLS settings between router and engine, unused on Unix sockets."""


HIDDEN = frozenset({"engine", "workers", *LINK_TO_ENGINE})
"""Router settings without an option here: engines listen on Unix sockets, and the router is one
process, as the engines need the cores."""


@settings_options(ServeSettings, RouterSettings, EngineSettings, hidden=HIDDEN, positional="model")
def serve(flags: Flags) -> None:
    """Serve a model: a router here, and an engine in a child process or one per NUMA node.

    --host, --port, --metrics-port, --max-message-bytes and --tls-... set the router. An engine
    listens on a Unix socket of this user only; its metrics port is the router's plus one, the next
    engine's plus two.
    MODEL is a Hub name, a local directory, a GGUF file or `demo`.
    """
    require("serve", "engine", "router")
    own_settings = load(ServeSettings, flags)
    router = load(RouterSettings, {**flags, "engine": ["127.0.0.1:50052"]})
    if router.workers > 1:
        raise typer.BadParameter(
            f"workers is {router.workers} (OCTAVO_WORKERS or the TOML file), but the router of "
            "`octavo serve` is one process: set it to 1 here, or run `octavo engine` and `octavo "
            "router --workers`"
        )
    own_flags: Flags = {"host": "127.0.0.1"}
    # Unset: each server picks a free port if its default is in use.
    if "metrics_port" in router.model_fields_set:
        own_flags["metrics_port"] = _metrics_port_of_engine(router.metrics_port, 0)
    engine = load(EngineSettings, {**_without(flags, "max_message_bytes"), **own_flags})
    logging.configure(router.log_format, router.log_level)
    router = router.model_copy(update=dict.fromkeys(LINK_TO_ENGINE))
    engine = engine.model_copy(update=dict.fromkeys(PORT_OF_ENGINE))
    running.run(
        lambda progress: running.unless_stopped(
            _serve(router, engine, own_settings.engines_per_node, progress)
        ),
        router.log_format,
    )


def _metrics_port_of_engine(port: int, number: int) -> int:
    """Return an engine's metrics port, derived from the router's; 0 disables metrics.

    Args:
        port: The router's port.
        number: Number of the engine, from 0.

    Raises:
        typer.BadParameter: The port would exceed 65535.
    """
    if port and port + 1 + number > LAST_PORT:
        raise typer.BadParameter(
            f"--metrics-port is {port}, but each engine's metrics need the next port, and there is "
            "none: choose a lower port, or 0 for no metrics"
        )
    return port + 1 + number if port else 0


def settings_of_engines(
    router: RouterSettings, engine: EngineSettings, count: int
) -> list[EngineSettings]:
    """Return the settings of `count` engines, which differ in their metrics ports."""
    if "metrics_port" not in engine.model_fields_set:
        return [engine] * count
    ports = [_metrics_port_of_engine(router.metrics_port, number) for number in range(count)]
    return [engine.model_copy(update={"metrics_port": port}) for port in ports]


def listeners_of_engines(
    router: RouterSettings, engines: Sequence[EngineSettings]
) -> list[Listener]:
    """Return the engines' metrics addresses, unless a port in use may be replaced."""
    if "metrics_port" not in engines[0].model_fields_set:
        return []
    listeners = []
    for number, engine in enumerate(engines, 1):
        place, owner = ("the port", "the engine's")
        if number > 1:
            place, owner = f"{number} ports", f"engine {number}'s"
        reason = f"it is {place} after --metrics-port {router.metrics_port}, and {owner}"
        listener = metrics_listener(engine.host, engine.metrics_port)
        listeners.append(replace(listener, action=f"serve {owner} metrics", reason=reason))
    return listeners


def _without(flags: Flags, name: str) -> Flags:
    """Return the flags without one of them."""
    return {key: value for key, value in flags.items() if key != name}


async def _serve(
    router: RouterSettings,
    engine: EngineSettings,
    engines_per_node: Words | int,
    progress: running.Progress,
) -> None:
    """Run a router and engines; stop the router before the engines."""
    from octavo.cli import preflight  # noqa: PLC0415 - in an extra, like the next three
    from octavo.cli.engine_group import EngineGroup  # noqa: PLC0415
    from octavo.cli.engine_plan import plan_engines, read_machine  # noqa: PLC0415
    from octavo.common.models import cache  # noqa: PLC0415

    preflight.check_router(router, listeners_of_engines(router, [engine]))
    cache.check_usable()
    progress.stage(f"Looking for {engine.model}")
    model = await call_in_thread(preflight.check_model, engine)
    await call_in_thread(preflight.check_tokenizer, router.tokenizer or str(model))
    placements = plan_engines(engines_per_node, read_machine(engine.device, model))
    engines = settings_of_engines(router, engine, len(placements) or 1)
    check_all(listeners_of_engines(router, engines))
    progress.stage(f"Loading {engine.model}")
    with (
        TemporaryDirectory(prefix="octavo-") as directory,  # mode 0700
        EngineGroup(engines, Path(directory), placements) as group,
    ):
        # Start the router while the model loads: its imports take seconds, and it reports a port in
        # use at once.
        server = await call_in_thread(_import_router)
        loop = asyncio.get_running_loop()
        served: asyncio.Future[generation_pb2.ModelCard] = loop.create_future()
        listening: asyncio.Future[str] = loop.create_future()
        ready = start(group.ready(), "engines-ready")
        announcing = report_failure(
            partial(_announce, ready, listening, served, router, progress), "announce"
        )
        try:
            async with joined(
                server.serve(
                    router.model_copy(update={"engine": group.addresses}),
                    on_ready=listening.set_result,
                    on_serving=served.set_result,
                    engines_ready=ready,
                    tokenizer=router.tokenizer or engine.model,
                ),
                _end_of(group, ready),
                names=("router", "engines"),
            ) as (serving, ended):
                await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not serving.done():
                    group.check()
                await serving
        finally:
            await end(announcing, ready)


async def _end_of(group: "EngineGroup", ready: asyncio.Task[None]) -> None:
    """Wait until a ready engine ends; the router reports failed starts."""
    await asyncio.wait({ready})
    if not ready.cancelled() and ready.exception() is None:
        await group.ended()
    else:
        await asyncio.Event().wait()


def _import_router() -> ModuleType:
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
