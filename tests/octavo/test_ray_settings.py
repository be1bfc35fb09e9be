"""What `octavo serve --ray` decides without a cluster: numbers of engines, resources, flags."""

import math

import pytest

from octavo.cli.serve_settings import ServeSettings
from octavo.common.settings import SettingsError
from octavo.ray.autoscaler import WINDOW_SECONDS, Autoscaler, Sample, Targets
from octavo.router.settings import RouterSettings

TARGETS = Targets(least=1, most=4, wait=2.0, kv_use=0.7, shrink_after=60.0)


class Service:
    """Requests that arrive at a rate, at engines that each admit one request a second.

    Engines that are added take requests after `loading` seconds.
    """

    def __init__(self, targets=TARGETS, loading=20):
        self.scaler = Autoscaler(targets)
        self.loading = loading
        self.time = 0.0
        self.wanted = targets.least
        self.ready_at = [0.0] * targets.least
        self.waiting = self.admitted = 0.0

    def run(self, seconds, rate=0.0, kv_use=0.0):
        """Return the numbers that there were to be, each second."""
        numbers = []
        for _ in range(seconds):
            engines = sum(at <= self.time for at in self.ready_at)
            self.waiting += rate
            served = min(self.waiting, engines)
            self.waiting -= served
            self.admitted += served
            sample = Sample(self.time, engines, math.ceil(self.waiting), self.admitted, kv_use)
            self.wanted = self.scaler.decide(sample, self.wanted)
            started = self.wanted - len(self.ready_at)
            self.ready_at += [self.time + self.loading] * started
            self.ready_at = sorted(self.ready_at)[: self.wanted]
            numbers.append(self.wanted)
            self.time += 1
        return numbers


def test_a_rate_within_what_an_engine_takes_adds_none():
    assert set(Service().run(300, rate=0.9)) == {1}


def test_a_rate_that_asks_for_three_gets_as_many_and_then_one_again():
    service = Service()
    numbers = service.run(200, rate=2.8)
    assert numbers[0] == 1
    assert max(numbers) >= 3
    service.run(300, rate=2.8)
    assert service.waiting < 30, "the engines keep up"
    busy = service.wanted
    numbers = service.run(300)
    assert numbers[0] == busy, "a pause of a second ends no engine"
    assert numbers[-1] == 1
    ends = [second for second in range(1, 300) if numbers[second] < numbers[second - 1]]
    assert len(ends) == busy - 1, "one after the other"


def test_no_engine_is_added_while_others_start():
    service = Service(loading=1000)
    numbers = service.run(400, rate=1.5)
    assert len(set(numbers)) <= 2, numbers


def test_a_full_cache_adds_engines_though_none_wait():
    service = Service(loading=0)
    service.run(1, kv_use=0.95)
    assert service.wanted == 2
    assert Service(loading=0).run(100, kv_use=0.7)[-1] == 1, "at the target the number stays"


def test_the_number_stays_within_its_limits():
    assert Service(Targets(2, 3)).run(300, rate=50)[-1] == 3
    assert set(Service(Targets(2, 2)).run(300, rate=50)) == {2}
    assert set(Service(Targets(2, 3)).run(600)) == {2}


def test_requests_that_none_admits_count_as_waiting():
    scaler = Autoscaler(TARGETS)
    wanted = 1
    for second in range(int(WINDOW_SECONDS)):
        wanted = scaler.decide(Sample(second, 1, 5, admitted=0, kv_use=0.1), wanted)
    assert wanted > 1


@pytest.mark.parametrize(
    ("asked", "device", "nodes", "expected"),
    [
        ({}, "auto", [{"CPU": 8}, {"CPU": 4}, {"memory": 1}], {"CPU": 4}),
        ({"memory": 9e9}, "cpu", [{"CPU": 8, "GPU": 1}], {"CPU": 8, "memory": 9e9}),
        ({}, "auto", [{"CPU": 8}, {"CPU": 32, "GPU": 4}], {"CPU": 4, "GPU": 1}),
        ({"GPU": 0.5}, "cuda", [], {"CPU": 4, "GPU": 0.5}),
        ({"GPU": 0, "CPU": 2}, "auto", [{"CPU": 32, "GPU": 4}], {"CPU": 2, "GPU": 0}),
        ({"CPU": 2}, "cpu", [], {"CPU": 2}),
    ],
)
def test_a_rank_gets_a_gpu_or_a_whole_node_unless_told(asked, device, nodes, expected):
    cluster = pytest.importorskip("octavo.ray.cluster", exc_type=ImportError)
    assert cluster.rank_resources(asked, device, nodes) == expected


def test_a_cluster_without_cpus_has_no_default():
    cluster = pytest.importorskip("octavo.ray.cluster", exc_type=ImportError)
    with pytest.raises(cluster.RayError, match="--ray-resources"):
        cluster.rank_resources({}, "auto", [{"memory": 1.0}])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ray_name": "a"}, "--ray-name needs --ray"),
        ({"ray": True, "engines_per_node": "2"}, "--ray-min-engines"),
        ({"ray": True, "ray_min_engines": 3, "ray_max_engines": 2}, "at least --ray-min-engines"),
        ({"ray": True, "ray_name": "a/b"}, "--ray-name"),
        ({"ray": True, "ray_resources": "{"}, "not valid JSON"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(flags, message):
    with pytest.raises(SettingsError, match=message):
        ServeSettings.load(**flags)


def test_a_name_on_a_ray_cluster_is_an_engine():
    assert RouterSettings(engine=["ray://a-1.b", "h:1"]).engine == ["ray://a-1.b", "h:1"]
    for wrong in ("ray://", "ray://host:1/", "ray:///a"):
        with pytest.raises(ValueError, match="ray://NAME"):
            RouterSettings(engine=[wrong])
