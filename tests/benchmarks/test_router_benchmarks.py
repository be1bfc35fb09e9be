"""Run the router's benchmarks briefly: they measure something; how fast is not tested."""

import pytest

from benchmarks import fairness, overload, router_cost


async def test_router_cost_counts_every_token():
    cost = await router_cost.measure(streams=8, rate=20.0, seconds=1.0, channels=2)
    assert cost.tokens >= cost.messages > 0
    assert 0 < cost.router_us < 10_000
    assert cost.engine_us > 0
    assert 0 < cost.gaps[0] <= cost.gaps[1]


@pytest.mark.slow
async def test_overload_serves_what_it_can_and_refuses_the_rest(monkeypatch, capsys):
    monkeypatch.setattr(overload, "OUTPUT_TOKENS", 16)
    monkeypatch.setattr(overload, "PLACES", 8)
    await overload.measure(seconds=3.0, load=3.0, deadline=4.0, paced=True)
    lines = capsys.readouterr().out
    assert " 0 failed []" in lines
    assert " 0 did not say when to come back" in lines
    assert sum(line.startswith(("PASS", "FAIL")) for line in lines.splitlines()) == 5


async def test_fairness_knows_its_tenants(monkeypatch):
    monkeypatch.setattr(fairness, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(fairness, "PLACES", 8)
    monkeypatch.setattr(fairness, "STREAMS", 12)
    served = await fairness.contended(4.0, {"a": 1.0, "b": 3.0})
    assert served["a"] > 0
    assert served["b"] / served["a"] == pytest.approx(3.0, rel=0.6)
