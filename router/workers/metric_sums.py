"""Merge the metrics of a router's processes.

Counters and histograms are summed. `MERGED` defines how to merge each gauge. Other gauges, and
metrics of a process such as its memory, get the label `worker`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.samples import Sample

PARENT = "parent"
"""Value of the label `worker` for the parent process; workers have numbers."""
ADDED = frozenset({"counter", "histogram"})
"""Types of metrics that only grow, and are added."""
OF_A_PROCESS = ("process_", "octavo_tasks")
"""Prefixes of metrics about a process, not about the router."""
CREATED = "_created"
"""Suffix of samples with a counter's creation time."""

Merge = Callable[[list[float], int], float]
"""Merges a gauge's values from several processes, given the number of workers."""
_Labels = tuple[tuple[str, str], ...]


def _of_all(values: list[float], workers: int) -> float:  # noqa: ARG001
    return sum(values)


def _least(values: list[float], workers: int) -> float:
    return min(values) if len(values) == workers else 0.0


def _first(values: list[float], workers: int) -> float:  # noqa: ARG001
    return values[0]


def _earliest(values: list[float], workers: int) -> float:  # noqa: ARG001
    return min(values)


MERGED: dict[str, Merge] = {
    "octavo_router": _first,  # only engine versions that all workers can use
    "octavo_router_engines_up": _least,  # engines that every worker can use
    "octavo_router_requests_in_flight": _of_all,
    "octavo_router_requests_queued": _of_all,
    "octavo_router_workers": _first,
}


def to_json(metrics: Iterable[Metric]) -> list[Any]:
    """Return metrics in a form that JSON can encode."""
    return [
        [
            *(metric.name, metric.documentation, metric.type, metric.unit),
            [[sample.name, sample.labels, sample.value] for sample in metric.samples],
        ]
        for metric in metrics
    ]


def from_json(data: Iterable[Any]) -> list[Metric]:
    """Return the metrics that `to_json` encoded."""
    metrics = []
    for name, documentation, kind, unit, samples in data:
        metric = Metric(name, documentation, kind, unit)
        metric.samples = [Sample(*sample) for sample in samples]
        metrics.append(metric)
    return metrics


def merged(pages: Mapping[str, Iterable[Metric]], ended: Iterable[Metric] = ()) -> list[Metric]:
    """Return the merged metrics of a router.

    Args:
        pages: Metrics of each process, by label; the parent's label is `PARENT`.
        ended: Counts of ended workers, from `counted`.
    """
    workers = sum(label != PARENT for label in pages)
    families: dict[str, _Family] = {}
    for label, page in (("", ended), *pages.items()):
        for metric in page:
            families.setdefault(metric.name, _Family(metric)).add(metric, label)
    return [family.metric(workers) for family in families.values()]


def counted(*pages: Iterable[Metric]) -> list[Metric]:
    """Sum counters and histograms, to keep them when a process ends."""
    kept = {
        str(number): [m for m in page if m.type in ADDED and not m.name.startswith(OF_A_PROCESS)]
        for number, page in enumerate(pages)
    }
    return merged(kept)


class _Family:
    """One metric, merged from all processes."""

    def __init__(self, metric: Metric) -> None:
        self._like = metric
        self._merge = MERGED.get(metric.name)
        if metric.type in ADDED and not metric.name.startswith(OF_A_PROCESS):
            self._merge = _of_all
        self._values: dict[tuple[str, _Labels], list[float]] = {}

    def add(self, metric: Metric, label: str) -> None:
        """Add a process's values."""
        for sample in metric.samples:
            labels = sample.labels if self._merge else {**sample.labels, "worker": label}
            key = sample.name, tuple(labels.items())
            self._values.setdefault(key, []).append(sample.value)

    def metric(self, workers: int) -> Metric:
        """Return the merged metric."""
        like = self._like
        made = Metric(like.name, like.documentation, like.type, like.unit)
        for (name, labels), values in self._values.items():
            merge = _earliest if name.endswith(CREATED) else self._merge or _first
            made.add_sample(name, dict(labels), merge(values, workers))
        return made
