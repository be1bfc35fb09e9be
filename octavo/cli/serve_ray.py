"""`octavo serve --ray`: runs a router here and its engines on a Ray cluster."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from octavo.cli import preflight, running
from octavo.cli.engine_process import EngineProcess
from octavo.cli.run_router import run_router
from octavo.cli.serve_settings import ServeSettings
from octavo.common import logging
from octavo.common.background import call_in_thread, end, start
from octavo.common.models import cache
from octavo.engine.settings import EngineSettings
from octavo.ray import cluster
from octavo.ray.autoscaler import Autoscaler, Sample, Targets
from octavo.ray.rank import EngineSpec
from octavo.ray.replica_set import ReplicaSet
from octavo.router.settings import RAY_SCHEME, RouterSettings

if TYPE_CHECKING:
    from octavo.router.server import Router

log = structlog.get_logger(__name__)

SCALE_SECONDS = 1.0
ADMITTED = "octavo_router_queue_time_seconds_count"
TLS_OF_RAY = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
"""Environment variables with the PEM files of a Ray node that uses TLS."""


async def serve_on_ray(
    router: RouterSettings,
    engine: EngineSettings,
    settings: ServeSettings,
    progress: running.Progress,
) -> None:
    """Run the router and engines; stop the router before the engines.

    Raises:
        StartError: There is no cluster, or the first engine cannot start.
    """
    preflight.check_router(router)
    cache.check_usable()
    tokenizer = router.tokenizer or engine.model
    progress.stage(f"Looking for the tokenizer of {tokenizer}")
    await call_in_thread(preflight.check_tokenizer, tokenizer)
    progress.stage("Connecting to the Ray cluster")
    try:
        async with _replicas(engine, settings) as replicas:
            progress.stage(f"Loading {engine.model} on the Ray cluster")
            ready = start(_ready(replicas), "engines-ready")
            made: asyncio.Future[Router] = asyncio.get_running_loop().create_future()
            own = {"engine": [f"{RAY_SCHEME}{settings.ray_name}"]}
            try:
                await run_router(
                    router.model_copy(update={**own, **_tls(router)}),
                    tokenizer,
                    ready,
                    partial(_scale, replicas, settings, made),
                    progress,
                    made.set_result,
                )
            finally:
                await end(ready)
    except cluster.RayError as error:
        raise running.StartError(str(error)) from error


@asynccontextmanager
async def _replicas(engine: EngineSettings, settings: ServeSettings) -> AsyncIterator[ReplicaSet]:
    """Connect to the cluster, and run engines on it within a block.

    Raises:
        RayError: There is no cluster, or the name is taken.
    """
    # Ray would put the actor's name before each line of JSON.
    await call_in_thread(partial(cluster.connect, show_logs=engine.log_format == "console"))
    try:
        nodes = await call_in_thread(cluster.node_resources)
        resources = cluster.rank_resources(settings.ray_resources, engine.device, nodes)
        launch = partial(make_process, engine)
        spec = EngineSpec(settings.ray_name, launch, engine.ranks, resources)
        least = settings.ray_min_engines
        async with ReplicaSet(settings.ray_name, spec, least, engine.drain_timeout) as replicas:
            yield replicas
    finally:
        await call_in_thread(cluster.disconnect)


def make_process(settings: EngineSettings, host: str) -> EngineProcess:
    """Return the process of a rank on this node, whose address is `host`."""
    logging.configure(settings.log_format, settings.log_level)
    own = {"host": host, "port": 0}
    if settings.tls is None and (files := tls_of_ray(os.environ)) is not None:
        own |= dict(zip(("tls_cert", "tls_key", "tls_client_ca"), files, strict=True))
    return EngineProcess(settings.model_copy(update=own))


def tls_of_ray(environment: Mapping[str, str]) -> tuple[Path, ...] | None:
    """Return this node's certificate, key and authorities; None if the cluster has no TLS."""
    if environment.get("RAY_USE_TLS", "0").lower() in {"", "0", "false"}:
        return None
    return tuple(Path(environment[name]) for name in TLS_OF_RAY)


def _tls(router: RouterSettings) -> dict[str, Path]:
    """Return the cluster's TLS files as router settings; empty if the router has its own."""
    files = tls_of_ray(os.environ)
    if router.engine_tls is not None or files is None:
        return {}
    return dict(zip(("engine_cert", "engine_key", "engine_ca"), files, strict=True))


async def _ready(replicas: ReplicaSet) -> None:
    """Wait until an engine accepts requests.

    Raises:
        StartError: The first engine cannot start.
    """
    try:
        await replicas.ready()
    except cluster.RayError as error:
        raise running.StartError(str(error)) from error


async def _scale(
    replicas: ReplicaSet, settings: ServeSettings, made: "asyncio.Future[Router]"
) -> None:
    """Adjust the number of engines once a second."""
    router = await made
    targets = Targets(
        settings.ray_min_engines,
        settings.ray_max_engines or settings.ray_min_engines,
        settings.ray_target_wait,
        settings.ray_target_kv_use,
        settings.ray_scale_down_delay,
    )
    autoscaler = Autoscaler(targets)
    while True:
        sample = _sample(router)
        wanted = autoscaler.decide(sample, replicas.wanted)
        if wanted != replicas.wanted:
            log.info(
                "number of engines changes",
                wanted=wanted,
                before=replicas.wanted,
                waiting=sample.waiting,
                kv_use=round(sample.kv_use, 2),
            )
            replicas.wanted = wanted
        await asyncio.sleep(SCALE_SECONDS)


def _sample(router: "Router") -> Sample:
    """Return the load of a router and its engines."""
    loads = [engine.load for engine in router.pool.up()]
    blocks = sum(load.total_blocks for load in loads)
    free = sum(load.free_blocks + load.cached_blocks for load in loads)
    counts = (
        sample.value
        for metric in router.registry.restricted_registry([ADMITTED]).collect()
        for sample in metric.samples
        if sample.name == ADMITTED
    )
    return Sample(
        time=time.monotonic(),
        engines=len(loads),
        waiting=len(router.admission) + sum(load.waiting for load in loads),
        admitted=sum(counts),
        kv_use=1 - free / blocks if blocks else 0.0,
    )
