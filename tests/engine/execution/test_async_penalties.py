"""Penalties of a step launched before the previous step's tokens are known."""

import pytest

from tests.engine.test_core import PATIENCE, Running

REQUESTS = {
    "repetition": {"repetition_penalty": 1.7},
    "presence": {"presence_penalty": 2.0, "temperature": 0.3, "seed": 5},
    "frequency": {"frequency_penalty": 1.5, "temperature": 0.2, "seed": 3},
    "all, several outputs": {
        "repetition_penalty": 1.2,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "temperature": 1.0,
        "seed": 7,
        "n": 3,
    },
    "none": {},
}


def outputs(model, *, async_scheduling, requests=REQUESTS, **settings):
    """Return each request's tokens by output, and the number of steps launched ahead."""
    engine = Running(model, begin=False, async_scheduling=async_scheduling, **settings)
    ahead = 0
    prepare = engine.parts.executor.prepare

    def count(batch, previous=None):
        nonlocal ahead
        ahead += previous is not None and bool(batch.num_sequences)
        return prepare(batch, previous)

    engine.parts.executor.prepare = count
    for i, (name, sampling) in enumerate(requests.items()):
        engine.submit(name, tokens=20 + i, max_tokens=40, **sampling)
    engine.thread.start()
    engine.heard.wait(lambda: all(map(engine.heard.ended, requests)))
    engine.wait_idle()
    engine.core.stop()
    engine.thread.join(PATIENCE)
    return {
        name: [
            [t for e in engine.heard.outputs(name) if e.index == index for t in e.token_ids]
            for index in range(sampling.get("n", 1))
        ]
        for name, sampling in requests.items()
    }, ahead


@pytest.fixture(scope="module")
def expected(tiny_model):
    found, ahead = outputs(tiny_model, async_scheduling=False)
    assert ahead == 0
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 14, "swap_space": 0}, {"num_blocks": 14, "preemption": "swap"}]
)
def test_are_those_of_a_step_that_waits(tiny_model, expected, settings):
    found, ahead = outputs(tiny_model, async_scheduling=True, **settings)
    assert found == expected
    assert ahead >= 38, "steps waited for tokens"


def test_change_the_outputs(tiny_model, expected):
    """Otherwise the test above would pass without penalties."""
    plain = {name: {**sampling} for name, sampling in REQUESTS.items()}
    for sampling in plain.values():
        for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            sampling.pop(penalty, None)
    without, _ = outputs(tiny_model, async_scheduling=False, requests=plain)
    assert [name for name in REQUESTS if without[name] == expected[name]] == ["none"]
