"""Prefix-aware balancing over real engines: benchmarks/balancing.py in short."""

import pytest

from benchmarks import balancing
from benchmarks.fixture import make_model


@pytest.mark.slow  # tests/router/balancing covers each policy
async def test_prefixes_stay_where_they_are_cached_and_load_stays_even(tmp_path):
    model = make_model(tmp_path)
    prompts = balancing.make_prompts(prefixes=50, rounds=4)
    aware = await balancing.measure(model, "prefix_aware", 2, prompts)
    turns = await balancing.measure(model, "round_robin", 2, prompts)
    assert sum(aware.requests) == sum(turns.requests) == len(prompts)
    assert aware.cached_tokens >= 1.5 * turns.cached_tokens
    assert aware.imbalance <= 0.2
