"""The serving benchmark runs on a CPU, and its lower bound matches a calculation by hand."""

import json

import numpy as np
import pytest

from benchmarks.gpu import serving
from benchmarks.gpu.serving_floor import Ceilings, floor_seconds
from benchmarks.gpu.shapes import LLAMA_7B, LLAMA_13B, Layout


@pytest.mark.slow
def test_a_tiny_model_is_served_beside_generate(tmp_path):
    arguments = ["--device", "cpu", "--tiny", "--model", "LLaMA-13B", "--out", str(tmp_path)]
    assert serving.main(arguments) == 0
    report = json.loads((tmp_path / "cpu-serving.json").read_text())["LLaMA-13B"]
    one, three = report["rows"]
    assert (one["n"], three["n"]) == (1, 3)
    assert one["tokens"] == 6 * 12
    assert three["tokens"] == 2 * 3 * 12
    for row in one, three:
        assert row["seconds"] > row["floor"] > 0
        assert max(row["generate"].values()) > 0


def test_sizes_are_those_of_the_models():
    for layout, billions in ((LLAMA_7B, 6.61), (LLAMA_13B, 12.85)):  # without embeddings
        weights = layout.layer_weights + layout.head_weights
        assert weights == pytest.approx(billions * 1e9, rel=1e-2)
    assert LLAMA_7B.kv_elements * 2 == 512 << 10


def test_the_floor_counts_weights_keys_and_operations():
    layout = Layout("by hand", 1, 2, 1, 4, intermediate_size=10, vocab_size=25)
    weights = 2 * 8 * (8 + 4) + 3 * 8 * 10  # the layer's
    head = 8 * 25
    kv = 2 * 4 * 2  # bytes per token
    # An output of 3 tokens after 5: steps that see 5, 6 and 7 tokens.
    requests = {"prompts": np.array([5]), "outputs": np.array([3])}
    wide = Ceilings(bandwidth=1e3, rate=float("inf"), memory=2 * (weights + head) + 9 * kv)
    found = floor_seconds(layout, **requests, n=1, ceilings=wide)
    steps = (5 + 6 + 7) / 9  # room for nine tokens
    assert found == pytest.approx((steps * 2 * (weights + head) + 18 * kv) / 1e3)
    two = floor_seconds(layout, **requests, n=2, ceilings=wide)
    steps = (3 * 5 + 2 * (1 + 2)) / 9  # they share the prompt, but each reads it
    assert two == pytest.approx((steps * 2 * (weights + head) + 36 * kv) / 1e3)
    slow = Ceilings(bandwidth=float("inf"), rate=1e3, memory=1 << 30)
    found = floor_seconds(layout, **requests, n=1, ceilings=slow)
    assert found == pytest.approx((2 * 5 * weights + 2 * 3 * (weights + head)) / 1e3)
