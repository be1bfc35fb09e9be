"""Run the router's benchmarks briefly: they report measurements, whose values are not tested."""

import pytest

from benchmarks import fairness, router_cost


async def test_router_cost_counts_every_token():
    cost = await router_cost.measure(streams=8, rate=20.0, seconds=1.0, channels=2)
    assert cost.tokens >= cost.messages > 0
    assert 0 < cost.router_us < 10_000
    assert cost.engine_us > 0
    assert 0 < cost.gaps[0] <= cost.gaps[1]


async def test_fairness_knows_its_tenants(monkeypatch):
    monkeypatch.setattr(fairness, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(fairness, "PLACES", 8)
    monkeypatch.setattr(fairness, "STREAMS", 12)
    served = await fairness.contended(4.0, {"a": 1.0, "b": 3.0})
    assert served["a"] > 0
    assert served["b"] / served["a"] == pytest.approx(3.0, rel=0.6)
