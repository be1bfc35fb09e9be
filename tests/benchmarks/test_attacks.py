"""Short runs of benchmarks/attacks.py: clients are served, and router memory does not grow."""

import pytest

from benchmarks import attacks

MB = 10**6
MOST = 200 * MB
"""Twice the benchmark's limit: freed memory shows late on a busy machine."""


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(name, marks=[] if name in ("half_headers", "long_texts") else pytest.mark.slow)
        for name in attacks.ATTACKS
    ],
)
async def test_a_neighbour_is_served_and_memory_stays(attack, tmp_path):
    async with attacks.service(tmp_path) as servers:
        outcome = await attacks.measure(servers, attack, seconds=1.5, rounds=1)
    assert not outcome.failed
    assert outcome.before
    assert outcome.during
    assert outcome.grown < MOST
