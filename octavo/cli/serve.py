"""`octavo serve`: run a router and its engines together."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli import running
from octavo.cli.extras import require
from octavo.cli.options import Flags, given_once, load, settings_options
from octavo.cli.run_router import run_router
from octavo.cli.serve_settings import ServeSettings, Words
from octavo.common import logging
from octavo.common.background import call_in_thread, end, start
from octavo.common.file_signature import FileWatch
from octavo.common.ports import Listener, check_all, metrics_listener
from octavo.common.settings import SettingsError
from octavo.engine.settings import EngineSettings
from octavo.router.settings import RouterSettings

if TYPE_CHECKING:
    from octavo.cli.engine_group import EngineGroup

LAST_PORT = 65535

LINK_TO_ENGINE = ("engine_ca", "engine_cert", "engine_key", "engine_tls_name")
PORT_OF_ENGINE = ("tls_cert", "tls_key", "tls_client_ca")
"""TLS settings between router and engine, unused on Unix sockets."""
OF_ROUTER = frozenset({"host", "port", "metrics_port", "max_message_bytes", *PORT_OF_ENGINE})
"""Flags that set the router alone, where engines choose their own addresses."""


HIDDEN = frozenset({"engine", "workers", *LINK_TO_ENGINE})
"""Router settings without an option here: engines listen on Unix sockets, and the router is one
process, as the engines need the cores."""


@settings_options(ServeSettings, RouterSettings, EngineSettings, hidden=HIDDEN)
def serve(
    flags: Flags,
    models_named: Annotated[
        list[str] | None,
        typer.Argument(help="The same as --model; several are loaded on demand.", metavar="MODEL"),
    ] = None,
) -> None:
    """Serve a model: a router here, and an engine in a child process or one per NUMA node.

    Several models, or those of --models or --models-dir, each have an engine that is started when
    a request names the model. With --ray, the engines run on a Ray cluster.

    --host, --port, --metrics-port, --max-message-bytes and --tls-... set the router. An engine
    listens on a Unix socket of this user only; its metrics port is the router's plus one, the next
    engine's plus two.
    MODEL is a Hub name, a local directory, a GGUF file or `demo`.
    """
    require("serve", "engine", "router")
    names = models_named or []
    if len(names) == 1:
        flags = {**flags, "model": given_once("model", names[0], flags.get("model"))}
    own_settings = load(ServeSettings, flags)
    router = load(RouterSettings, {**flags, "engine": ["127.0.0.1:50052"]})
    if router.workers > 1:
        raise typer.BadParameter(
            f"workers is {router.workers} (OCTAVO_WORKERS or the TOML file), but the router of "
            "`octavo serve` is one process: set it to 1 here, or run `octavo engine` and `octavo "
            "router --workers`"
        )
    if own_settings.ray:
        _serve_on_ray(flags, own_settings, router)
        return
    if len(names) > 1 or own_settings.on_demand:
        _serve_on_demand(flags, names, own_settings, router)
        return
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


def _serve_on_demand(
    flags: Flags, names: Sequence[str], own_settings: ServeSettings, router: RouterSettings
) -> None:
    """Serve several models, each with an engine that is started when a request names it."""
    from octavo.cli.models.catalog import read_catalog  # noqa: PLC0415 - in an extra, like the next
    from octavo.cli.models.serve_models import serve_models  # noqa: PLC0415

    shared = {n: flags[n] for n in flags if EngineSettings.has(n) and n not in OF_ROUTER}
    if "model" in shared and names:
        raise typer.BadParameter("models are given as arguments and by --model; use one of them")
    names = names or [shared.pop("model")] if "model" in shared else names
    limit = own_settings.max_memory
    read = partial(read_catalog, own_settings, names, shared, limit)
    source = own_settings.models or own_settings.models_dir
    file = None if source is None else FileWatch(source)
    try:
        models = read()
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    logging.configure(router.log_format, router.log_level)
    router = router.model_copy(
        update={**dict.fromkeys(LINK_TO_ENGINE), "engine": [], "tokenizer": None}
    )
    running.run(
        lambda progress: running.unless_stopped(
            serve_models(
                router,
                read,
                models,
                limit,
                file,
                progress,
                spare_engine=own_settings.spare_engine,
            )
        ),
        router.log_format,
    )


def _serve_on_ray(flags: Flags, own_settings: ServeSettings, router: RouterSettings) -> None:
    """Serve on a Ray cluster; each engine's node gives its address and, if free, its ports."""
    require("serve --ray", "ray")
    from octavo.cli.serve_ray import serve_on_ray  # noqa: PLC0415 - of an extra; it takes seconds

    engine = load(EngineSettings, {k: v for k, v in flags.items() if k not in OF_ROUTER})
    logging.configure(router.log_format, router.log_level)
    running.run(
        lambda progress: running.unless_stopped(
            serve_on_ray(router, engine, own_settings, progress)
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
    """Return the engines' metrics addresses; none if their ports may still be replaced."""
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
        ready = start(group.ready(), "engines-ready")
        try:
            await run_router(
                router.model_copy(update={"engine": group.addresses}),
                router.tokenizer or engine.model,
                ready,
                partial(_end_of, group, ready),
                progress,
            )
        finally:
            await end(ready)


async def _end_of(group: "EngineGroup", ready: asyncio.Task[None]) -> None:
    """Wait until one of the ready engines ends; the router reports a failed start.

    Raises:
        StartError: It has ended.
    """
    await asyncio.wait({ready})
    if not ready.cancelled() and ready.exception() is None:
        await group.ended()
        group.check()
    await asyncio.Event().wait()
