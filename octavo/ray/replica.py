"""One engine on the cluster: a placement group, and the actor of rank 0 in it."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import ray
import structlog
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.exceptions import RayError as RayFailure
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from octavo.common.background import call_in_thread
from octavo.ray.cluster import RayError
from octavo.ray.rank import EngineSpec, rank_actor

log = structlog.get_logger(__name__)

PACK = "PACK"
"""Placement strategy: all ranks on one node if they fit, otherwise on several."""
FIRST_WAIT, LONGEST_WAIT = 5.0, 120.0
"""Seconds between log lines while an engine waits for resources; doubled each time."""
LOOK_SECONDS = 1.0
RETRY_SECONDS = 0.5
STOP_SECONDS = 10.0


class Replica:
    """An engine on the cluster, from its placement to its end.

    Args:
        spec: The engine to start.
        drain_seconds: Maximum seconds for its requests to finish.
        on_change: Called when its address has changed.

    Attributes:
        address: HOST:PORT while it accepts requests, otherwise empty.
        leaving: Whether another is to replace it, as its node is about to go.
        draining: Whether it is about to end.
    """

    def __init__(
        self, spec: EngineSpec, drain_seconds: float, on_change: Callable[[], None]
    ) -> None:
        self.address = ""
        self.leaving = False
        self.draining = False
        self._spec = spec
        self._drain_seconds = drain_seconds
        self._on_change = on_change
        self._group: Any = None
        self._actor: Any = None

    async def run(self) -> None:
        """Place it, start it, and wait until it has drained; Ray restarts it after failures.

        Raises:
            RayError: It cannot start, or Ray does not restart it.
        """
        bundles = [dict(self._spec.resources)] * self._spec.ranks
        self._group = group = placement_group(bundles, strategy=PACK)
        try:
            await self._placed(group)
            if self.draining:
                return
            actor = rank_actor(self._spec, 0, group, max_restarts=-1)
            self._actor = actor.remote(self._spec, 0, {})
            while not self.draining:
                await self._serve()
                self._set_address("")
                await asyncio.sleep(RETRY_SECONDS)
                await self._placed(group)
        finally:
            self._set_address("")
            remove_placement_group(group)  # ends the actors in it

    async def drain(self) -> None:
        """Withdraw the engine from routers, wait for its requests, then end it and `run`."""
        self.draining = True
        self._set_address("")
        if self._actor is None:
            return
        try:
            async with asyncio.timeout(self._drain_seconds + STOP_SECONDS):
                await self._actor.drain.remote()
        except (RayFailure, TimeoutError) as error:
            log.warning("engine not drained", engine=self._spec.name, reason=_first_line(error))
        finally:
            ray.kill(self._actor)

    def is_on(self, nodes: set[str]) -> bool:
        """Return whether a rank is on one of the nodes."""
        if self._group is None or not nodes:
            return False
        return not nodes.isdisjoint(
            placement_group_table(self._group)["bundles_to_node_id"].values()
        )

    async def _placed(self, group: PlacementGroup) -> None:
        """Wait until the cluster has room or the engine drains; log the missing resources."""
        began, wait = time.monotonic(), FIRST_WAIT
        while not (self.draining or await call_in_thread(group.wait, LOOK_SECONDS)):
            if time.monotonic() < began + wait:
                continue
            free = await call_in_thread(ray.available_resources)
            log.warning(
                "engine waits for resources",
                engine=self._spec.name,
                needs=f"{self._spec.ranks} x {dict(self._spec.resources)}",
                free={name: free.get(name, 0.0) for name in self._spec.resources},
                hint="`ray status` shows who has them; add nodes, or lower --ray-resources",
            )
            wait += min(wait, LONGEST_WAIT)

    async def _serve(self) -> None:
        """Wait until rank 0 serves, and then until it ends.

        Raises:
            RayError: It cannot start, or Ray does not restart it.
        """
        try:
            address = await self._actor.ready.remote()
            if not self.draining:
                log.info("engine ready", engine=self._spec.name, address=address)
                self._set_address(address)
            await self._actor.ended.remote()
        except ActorUnavailableError as error:
            if self.address:
                log.warning("engine lost", engine=self._spec.name, reason=_first_line(error))
        except RayFailure as error:
            if self.draining:
                return
            if isinstance(error, RayTaskError):
                raise RayError(str(error.cause)) from error
            raise RayError(f"Ray does not restart it: {_first_line(error)}") from error

    def _set_address(self, address: str) -> None:
        if address != self.address:
            self.address = address
            self._on_change()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
