"""Stats that a worker serves over HTTP: the whole router's, from the parent process."""

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

import grpc.aio
from prometheus_client import CollectorRegistry, Metric

from octavo.common import rpc
from octavo.router.http.stats import for_clients
from octavo.router.workers import wire
from octavo.router.workers.loop_collector import SECONDS, LoopCollector
from octavo.router.workers.metric_sums import from_json


class SharedStats:
    """The stats of a router with several workers.

    Args:
        parent: Path of the parent's Unix socket.

    Attributes:
        registry: The router's metrics.
    """

    def __init__(self, parent: Path) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(LoopCollector(self._metrics))
        self._channel = wire.channel(parent)

    async def status(self, models: AbstractSet[str]) -> dict[str, Any]:
        """Return the stats of the router and of the connected engines of `models`."""
        return for_clients(await self._call("Status"), models)

    async def close(self) -> None:
        """Close the connection to the parent."""
        await self._channel.close()

    async def _metrics(self) -> list[Metric]:
        return from_json(await self._call("Metrics"))

    async def _call(self, method: str) -> Any:  # noqa: ANN401 - any JSON
        try:
            return await wire.call(self._channel, method, None, SECONDS)
        except grpc.aio.AioRpcError as error:
            raise rpc.RpcError.from_call(error) from error
