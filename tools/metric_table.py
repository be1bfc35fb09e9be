"""The tables of metrics in docs/operating.md: `python -m tools.metric_table`."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric

from octavo.common.metrics import observe_process
from octavo.engine.metrics import EngineMetrics
from octavo.router.server import Router
from octavo.router.settings import RouterSettings
from octavo.router.workers.page import WorkerMetrics
from tools.generated_part import MadePart

PLACE = MadePart(Path("docs/operating.md"), "metrics", target="docs")
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
"""What Prometheus has after a metric's name, by type."""


async def registries() -> dict[str, CollectorRegistry]:
    """Return the metrics of processes that have not started, by what the processes are."""
    process = CollectorRegistry()
    observe_process(process)
    workers = CollectorRegistry()
    WorkerMetrics(workers)
    return {
        "A router's": Router(RouterSettings.load()).registry,
        "Besides, of a router with `--workers` above 1": workers,
        "An engine's": EngineMetrics().registry,
        "Both": process,
    }


def metrics(registry: CollectorRegistry) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Each metric with the names of its labels, those that have none yet too."""
    for collector in registry._collector_to_names:  # noqa: SLF001 - else those without are left out
        describe = getattr(collector, "describe", collector.collect)
        for metric in describe():
            yield metric, getattr(collector, "_labelnames", ())


def markdown() -> str:
    """Return the tables, one for each kind of process."""
    parts = []
    for title, registry in asyncio.run(registries()).items():
        rows = ["| metric | type | labels | |", "| --- | --- | --- | --- |"]
        for metric, labels in metrics(registry):
            suffix = SUFFIXES[metric.type][0] if metric.type in {"counter", "info"} else ""
            named = ", ".join(f"`{label}`" for label in labels)
            name = f"`{metric.name}{suffix}`"
            rows.append(f"| {name} | {metric.type} | {named} | {metric.documentation} |")
        parts.append(f"{title}:\n\n" + "\n".join(rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    PLACE.renew(markdown())
