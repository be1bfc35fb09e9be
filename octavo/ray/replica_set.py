"""Keeps the wanted number of a model's engines on a Ray cluster, and publishes their addresses."""

import asyncio
from contextlib import suppress
from typing import Any, Self

import structlog
from ray.exceptions import RayError as RayFailure

from octavo.common.background import call_in_thread, end, keep_running, restart_delays, start
from octavo.ray.cluster import draining_nodes
from octavo.ray.directory import make_directory
from octavo.ray.rank import EngineSpec
from octavo.ray.replica import Replica

log = structlog.get_logger(__name__)

PERIOD_SECONDS = 1.0
PUBLISH_SECONDS = 5.0
"""Seconds between repeated publications: Ray may have restarted the directory."""


class ReplicaSet:
    """Runs engines within an `async with` block; they drain at its end.

    Args:
        name: The name of their directory.
        spec: The description of each engine.
        count: Their initial number.
        drain_seconds: Maximum seconds for their requests to finish.

    Attributes:
        wanted: Number of engines to run.
    """

    def __init__(self, name: str, spec: EngineSpec, count: int, drain_seconds: float) -> None:
        self.wanted = count
        self._name = name
        self._spec = spec
        self._drain_seconds = drain_seconds
        self._replicas: dict[Replica, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[None]] = set()
        self._delays = restart_delays()
        self._changed = asyncio.Event()
        self._serving: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._directory: Any = None
        self._published: tuple[float, list[str]] = (0.0, [])
        self._keeping: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Wait until an engine accepts requests.

        Raises:
            RayError: The first engine cannot start.
        """
        await asyncio.shield(self._serving)

    async def __aenter__(self) -> Self:
        self._directory = make_directory(self._name)
        self._directory.set.remote([])
        self._keeping = keep_running(self._keep, "replicas")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._keeping is not None
        await end(self._keeping)
        drains = [replica.drain() for replica in self._replicas if not replica.draining]
        await asyncio.gather(*drains, *self._drains, return_exceptions=True)
        await end(*self._replicas.values())

    async def _keep(self) -> None:
        """Start and end engines, and publish their addresses, until cancelled."""
        while True:
            self._changed.clear()
            self._mark(await call_in_thread(draining_nodes))
            self._reconcile()
            await self._publish()
            with suppress(TimeoutError):
                async with asyncio.timeout(PERIOD_SECONDS):
                    await self._changed.wait()

    def _mark(self, nodes: set[str]) -> None:
        """Mark the engines on draining nodes, so that others replace them."""
        for replica in self._staying:
            if replica.is_on(nodes):
                log.info("engine leaves a node that drains", address=replica.address)
                replica.leaving = True

    def _reconcile(self) -> None:
        """Start missing engines, and drain surplus ones."""
        staying = self._staying
        for _ in range(self.wanted - len(staying)):
            replica = Replica(self._spec, self._drain_seconds, self._changed.set)
            self._replicas[replica] = start(self._run(replica), "replica")
        ready_last = sorted(staying, key=lambda replica: bool(replica.address))
        surplus = ready_last[: max(len(staying) - self.wanted, 0)]
        if any(replica.address for replica in staying):
            surplus += [each for each in self._replicas if each.leaving and not each.draining]
        for replica in surplus:
            self._drains.add(drain := start(replica.drain(), "drain"))
            drain.add_done_callback(self._drains.discard)

    async def _run(self, replica: Replica) -> None:
        try:
            await replica.run()
        except Exception as error:
            if not self._serving.done():
                self._serving.set_exception(error)
                return
            delay = next(self._delays)
            log.exception("engine failed", restart_seconds=delay)
            await asyncio.sleep(delay)
        finally:
            del self._replicas[replica]
            self._changed.set()

    async def _publish(self) -> None:
        """Publish the addresses to routers."""
        addresses = sorted(replica.address for replica in self._replicas if replica.address)
        now = asyncio.get_running_loop().time()
        told, last = self._published
        if addresses == last and (not addresses or now < told + PUBLISH_SECONDS):
            return
        try:
            async with asyncio.timeout(PUBLISH_SECONDS):
                await self._directory.set.remote(addresses)
        except (RayFailure, TimeoutError) as error:
            reason = str(error) or "the Ray cluster does not answer"
            log.warning("addresses of engines not published", reason=reason)
            return
        self._published = now, addresses
        if addresses and not self._serving.done():
            self._serving.set_result(None)

    @property
    def _staying(self) -> list[Replica]:
        return [each for each in self._replicas if not (each.draining or each.leaving)]
