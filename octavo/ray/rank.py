"""The actor of one rank of an engine: it runs the rank's process and ends with it.

Rank 0 owns the actors of the other ranks. So Ray ends these with it, and restarts only
rank 0, which starts new ones: the ranks of an engine start and end together.
"""

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import ray
import structlog
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from octavo.common.background import call_in_thread, joined, shielded, start
from octavo.common.ports import free_port
from octavo.common.shutdown import exit_at_once
from octavo.ray.cluster import RayError, Resources, actor_options, interface_of

log = structlog.get_logger(__name__)

START_SECONDS = 5.0
"""Seconds to wait for rank 0's own error when another rank fails at the start."""


class RankProcess(Protocol):
    """The process of a rank: rank 0 serves, the others compute for it."""

    def start(self) -> None:
        """Start it."""

    async def ready(self) -> str:
        """Wait until it serves, and return its address; raise an error if it cannot."""

    async def ended(self) -> None:
        """Wait until it has ended."""

    def end(self) -> str:
        """Return why it ended."""

    def stop(self) -> None:
        """Let it drain, and wait for its end."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The description of an engine to start.

    Attributes:
        name: Its name in logs.
        launch: Function that makes a rank's process from the node's address, not started yet.
        ranks: Number of its ranks.
        resources: The resources of each rank.
    """

    name: str
    launch: Callable[[str], RankProcess]
    ranks: int
    resources: Resources


class Rank:
    """The actor of a rank.

    Args:
        spec: Its engine.
        rank: Its number.
        variables: Environment variables of the ranks' rendezvous, which rank 0 sets.
    """

    def __init__(self, spec: EngineSpec, rank: int, variables: dict[str, str]) -> None:
        self._name = spec.name if spec.ranks == 1 else f"{spec.name} rank {rank}"
        self._others: list[Any] = []
        self._stopping = False
        self._starting: asyncio.Task[str] | None = None
        self._watching: asyncio.Task[None] | None = None
        host = ray.util.get_node_ip_address()
        if spec.ranks > 1:
            self._join(spec, rank, host, variables)
        self._process = spec.launch(host)
        self._process.start()

    def __repr__(self) -> str:
        return self._name  # Ray's prefix of each log line

    async def ready(self) -> str:
        """Wait until the engine accepts requests; return its address.

        Raises:
            RayError: It cannot start.
        """
        if self._starting is None:
            self._starting = start(self._start(), "start")
        return await shielded(self._starting)

    async def ended(self) -> str:
        """Wait until the process has ended; return what ended it."""
        await self._process.ended()
        return self._process.end()

    async def drain(self) -> None:
        """Let the engine finish its requests, and wait for its end."""
        self._stopping = True
        await call_in_thread(self._process.stop)

    def _join(self, spec: EngineSpec, rank: int, host: str, variables: dict[str, str]) -> None:
        """Set this process' environment; rank 0 starts the other ranks."""
        group = ray.util.get_current_placement_group()
        nodes = placement_group_table(group)["bundles_to_node_id"]
        here = [number for number in range(spec.ranks) if nodes[number] == nodes[rank]]
        if spec.resources.get("GPU"):
            here = [rank]  # Ray shows each rank only its own GPU
        if not rank:
            variables = {"MASTER_ADDR": host, "MASTER_PORT": str(free_port())}
        os.environ |= {
            **variables,
            "RANK": str(rank),
            "WORLD_SIZE": str(spec.ranks),
            "LOCAL_RANK": str(here.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(here)),
        }
        if (interface := interface_of(host)) is not None:  # the host's name may resolve to lo
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        if not rank:
            self._others = [
                rank_actor(spec, number, group).remote(spec, number, variables)
                for number in range(1, spec.ranks)
            ]

    async def _start(self) -> str:
        works = self._ready(), self._rank_ended()
        async with joined(*works, expected=(Exception,)) as (ready, lost):
            await asyncio.wait({ready, lost}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({ready}, timeout=START_SECONDS if lost.done() else None)
            address = ready.result() if ready.done() else lost.result()
        self._watching = start(self._watch(), "watch")
        return address

    async def _ready(self) -> str:
        try:
            return await self._process.ready()
        except Exception as error:
            raise RayError(str(error)) from error  # a class that every driver can unpickle

    async def _rank_ended(self) -> NoReturn:
        """Wait until another rank has ended.

        Raises:
            RayError: It has.
        """
        if not self._others:
            await asyncio.Event().wait()
        ends = [start(_end_of(rank), "rank") for rank in self._others]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        number = next(number for number, end in enumerate(ends, 1) if end in done)
        error = done.pop().exception()
        why = "its actor died" if error else "its process ended"
        raise RayError(f"rank {number} ended while the engine started ({why}): see its log")

    async def _watch(self) -> None:
        """End this actor when its process has ended by itself, so that Ray restarts it."""
        why = await self.ended()
        if not self._stopping:
            log.error("the engine ended by itself: Ray restarts it", engine=self._name, why=why)
            exit_at_once(1)


async def _end_of(rank: Any) -> str:  # noqa: ANN401 - Ray's actor handles have no types
    """Wait until a rank's process has ended; return what ended it."""
    why: str = await rank.ended.remote()
    return why


def rank_actor(spec: EngineSpec, rank: int, group: Any, **options: Any) -> Any:  # noqa: ANN401
    """Return the actor class of a rank in its bundle of a placement group."""
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    own = {**actor_options(spec.resources), "scheduling_strategy": place, **options}
    return ray.remote(Rank).options(**own)
