"""Metrics of several processes, merged into one router's."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from octavo.router.server import Router
from octavo.router.settings import RouterSettings
from octavo.router.workers.metric_sums import (
    ADDED,
    MERGED,
    OF_A_PROCESS,
    counted,
    from_json,
    merged,
    to_json,
)
from octavo.router.workers.page import WorkerMetrics


class Worker:
    """Metrics like those of a router."""

    def __init__(self):
        self.registry = registry = CollectorRegistry()
        Info("octavo_router", "Version.", registry=registry).info({"version": "1"})
        self.requests = Counter("octavo_router_requests", "R.", ["code"], registry=registry)
        self.ttft = Histogram("octavo_router_ttft_seconds", "T.", registry=registry, buckets=[1])
        self.queued = Gauge("octavo_router_requests_queued", "Q.", registry=registry)
        self.up = Gauge("octavo_router_engines_up", "E.", ["model"], registry=registry)
        self.tasks = Gauge("octavo_tasks", "Tasks.", registry=registry)
        self.other = Gauge("octavo_router_other", "Of no rule.", registry=registry)

    def page(self):
        return from_json(to_json(self.registry.collect()))


def values(metrics):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for metric in metrics
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def two():
    first, second = Worker(), Worker()
    first.requests.labels("OK").inc(3)
    second.requests.labels("OK").inc(4)
    second.requests.labels("INTERNAL").inc()
    first.ttft.observe(0.5)
    second.ttft.observe(2)
    first.queued.set(2)
    second.queued.set(5)
    first.up.labels("m").set(2)
    second.up.labels("m").set(1)
    first.up.labels("n").set(1)
    first.tasks.set(7)
    first.other.set(9)
    return first, second


def test_each_metric_is_that_of_the_router():
    first, second = two()
    found = values(merged({"0": first.page(), "1": second.page()}))
    assert found["octavo_router_requests_total", ("code", "OK")] == 7
    assert found["octavo_router_requests_total", ("code", "INTERNAL")] == 1
    assert found["octavo_router_ttft_seconds_count",] == 2
    assert found["octavo_router_ttft_seconds_sum",] == 2.5
    assert found["octavo_router_ttft_seconds_bucket", ("le", "1.0")] == 1
    assert found["octavo_router_ttft_seconds_bucket", ("le", "+Inf")] == 2
    assert found["octavo_router_requests_queued",] == 7
    assert found["octavo_router_engines_up", ("model", "m")] == 1, "those that all workers have"
    assert found["octavo_router_engines_up", ("model", "n")] == 0
    assert found["octavo_router_info", ("version", "1")] == 1
    assert found["octavo_tasks", ("worker", "0")] == 7
    assert found["octavo_router_other", ("worker", "0")] == 9


def test_the_parent_has_no_say_in_what_workers_see():
    first, _ = two()
    parent = CollectorRegistry()
    WorkerMetrics(parent).workers.set(1)
    found = values(merged({"parent": parent.collect(), "0": first.page()}))
    assert found["octavo_router_engines_up", ("model", "m")] == 2
    assert found["octavo_router_workers",] == 1


def test_what_ended_workers_counted_stays():
    first, second = two()
    before = values(merged({"0": first.page(), "1": second.page()}))
    ended = counted(counted([], first.page()), [])
    fresh = Worker()
    after = values(merged({"0": fresh.page(), "1": second.page()}, ended))
    for key, value in before.items():
        if key[0].startswith(("octavo_router_requests_total", "octavo_router_ttft")):
            assert after[key] == value
    assert after["octavo_router_requests_queued",] == 5, "it waits for nothing any more"


def test_a_counter_is_as_old_as_its_oldest():
    first, second = two()
    pages = {"0": first.page(), "1": second.page()}
    created = [
        sample.value
        for page in pages.values()
        for metric in page
        for sample in metric.samples
        if sample.name == "octavo_router_ttft_seconds_created"
    ]
    (made,) = [
        sample.value
        for metric in merged(pages)
        for sample in metric.samples
        if sample.name == "octavo_router_ttft_seconds_created"
    ]
    assert made == min(created)


async def test_every_gauge_of_a_router_has_a_rule():
    """Otherwise a new metric would silently get the label `worker`: decide how to merge it."""
    registry = Router(RouterSettings()).registry
    WorkerMetrics(registry)
    for metric in registry.collect():
        if metric.type not in ADDED and not metric.name.startswith(OF_A_PROCESS):
            assert metric.name in MERGED
