"""The engines' load, as last reported."""

from collections.abc import Set as AbstractSet
from operator import itemgetter
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from octavo.router.engines.link import EngineLink
from octavo.router.engines.pool import EnginePool
from octavo.router.generate import Generator
from octavo.v1 import engine_pb2

LOAD = [field.name for field in engine_pb2.Load.DESCRIPTOR.fields]
PRIVATE = {"address", "instance", "models"}
"""Fields of an engine that GET /status omits; operators get them from AdminService."""


class RouterStats(Protocol):
    """The router's stats for GET /status and GET /metrics.

    Attributes:
        registry: Its metrics.
    """

    registry: CollectorRegistry

    async def status(self, models: AbstractSet[str]) -> dict[str, Any]:
        """Return the stats of the router and of the connected engines of `models`."""


class LocalStats:
    """The stats of a router that runs as one process.

    Args:
        registry: Its metrics.
        pool: Its engines.
        generator: Serves its requests.
    """

    def __init__(self, registry: CollectorRegistry, pool: EnginePool, generator: Generator) -> None:
        self.registry = registry
        self._pool = pool
        self._generator = generator

    def all(self) -> dict[str, Any]:
        """Return the stats of the router and of all connected engines, with their addresses."""
        return {
            "requests": self._generator.in_flight,
            "output_tokens": self._generator.metrics.total_output_tokens,
            "engines": sorted(map(_engine, self._pool.used), key=itemgetter("address")),
        }

    async def status(self, models: AbstractSet[str]) -> dict[str, Any]:
        """Return the stats of the router and of the connected engines of `models`."""
        return for_clients(self.all(), models)


def for_clients(stats: dict[str, Any], models: AbstractSet[str]) -> dict[str, Any]:
    """Return the stats that clients of `models` may see."""
    engines = [
        {name: value for name, value in engine.items() if name not in PRIVATE}
        for engine in stats["engines"]
        if not models.isdisjoint(engine["models"])
    ]
    return {**stats, "engines": engines}


def _engine(link: EngineLink) -> dict[str, Any]:
    engine = link.up
    assert engine is not None
    info, load = engine.info, engine.load
    return {
        "address": link.address,
        "instance": engine.instance,
        "models": engine.models,
        "model": info.model,
        "role": engine.role,
        "device": info.device,
        "dtype": info.dtype,
        "block_size": info.block_size,
        "block_bytes": info.block_bytes,
        "max_num_seqs": info.max_num_seqs,
        "taking_requests": link.taking is not None,
        "sequences": engine.sequences,
        "load": {name: getattr(load, name) for name in LOAD},
    }
