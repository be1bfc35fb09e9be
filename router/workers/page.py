"""The metrics page of a router with several workers."""

import asyncio
from collections.abc import Iterable

import grpc.aio
import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Metric

from octavo.common.metrics import observe_process
from octavo.router.workers import wire
from octavo.router.workers.loop_collector import LoopCollector
from octavo.router.workers.members import Member, Members
from octavo.router.workers.metric_sums import PARENT, counted, from_json, merged

log = structlog.get_logger(__name__)

SCRAPE_SECONDS = 2.0
"""Timeout in seconds to get a worker's metrics."""


class WorkerMetrics:
    """Metrics that only a router with several workers has.

    Args:
        registry: Registry for the metrics.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.workers = Gauge(
            "octavo_router_workers", "Worker processes that serve.", registry=registry
        )
        self.restarts = Counter(
            "octavo_router_worker_restarts",
            "Worker processes that ended unexpectedly and were restarted.",
            registry=registry,
        )


class Page:
    """The merged metrics of all processes of a router.

    When a worker ends, its last counts are kept: if sums fell, Prometheus would assume a counter
    reset and count the rest twice.

    Args:
        members: The workers.

    Attributes:
        own: Metrics of the parent process.
        metrics: Metrics about the workers.
        registry: Registry of all metrics.
    """

    def __init__(self, members: Members) -> None:
        self.own = CollectorRegistry()
        self.metrics = WorkerMetrics(self.own)
        self.registry = CollectorRegistry()
        self.registry.register(LoopCollector(self.collect))
        self._members = members
        self._last: dict[int, list[Metric]] = {}
        self._ended: list[Metric] = []
        # Collect one at a time, so that a worker's older answer never replaces a newer one.
        self._collecting = asyncio.Lock()
        observe_process(self.own)

    async def collect(self) -> list[Metric]:
        """Return all workers' metrics; for one that does not answer, its last counts."""
        async with self._collecting:
            members = list(self._members)
            answers = await asyncio.gather(*map(_scrape, members), return_exceptions=True)
            pages: dict[str, Iterable[Metric]] = {PARENT: list(self.own.collect())}
            silent = []
            for member, answer in zip(members, answers, strict=True):
                if member not in self._members:
                    continue  # ended meanwhile
                if isinstance(answer, BaseException):
                    log.warning(
                        "a worker sent no metrics", worker=member.number, reason=str(answer)
                    )
                    silent.append(self._last.get(member.number, []))
                else:
                    pages[str(member.number)] = self._last[member.number] = answer
            return merged(pages, counted(self._ended, *silent))

    def end(self, number: int) -> None:
        """Keep the counts of an ended worker."""
        self._ended = counted(self._ended, self._last.pop(number, []))


async def _scrape(member: Member) -> list[Metric]:
    try:
        return from_json(await wire.call(member.channel, "Metrics", None, SCRAPE_SECONDS))
    except grpc.aio.AioRpcError as error:
        raise TimeoutError(error.details()) from None
