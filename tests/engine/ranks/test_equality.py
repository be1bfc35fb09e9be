"""Several ranks give the tokens of one, whatever memory does."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import (
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen3Config,
)

from octavo.engine.ranks.place import Place
from octavo.engine.ranks.world import STORE
from tests.engine.random_model import save_random_model

COMMON = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
MODELS = {
    "llama": LlamaConfig(**COMMON),
    "few key and value heads": LlamaConfig(**COMMON | {"num_key_value_heads": 1}),
    "qwen3": Qwen3Config(**COMMON | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "gemma3": Gemma3TextConfig(
        **COMMON | {"num_key_value_heads": 2, "sliding_window": 24, "sliding_window_pattern": 2}
    ),
    "gpt2": GPT2Config(vocab_size=500, n_embd=64, n_layer=2, n_head=4, n_positions=128),
    "mixtral": MixtralConfig(
        **COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    ),
}


QUICK = ("few key and value heads", "mixtral")


def save_models(names, folder):
    """Write tiny random models, whose choices are clear; return their paths."""
    paths = []
    for name in names:
        path = folder / name.replace(" ", "_")
        save_random_model(MODELS[name], path, std=0.15, dtype=torch.float32)
        paths.append(str(path))
    return paths


def run_ranks(size, models, folder):
    """Run the workload on `size` ranks; return what rank 0 printed."""
    places = [Place(rank, size, rank, size) for rank in range(size)]
    command = [sys.executable, "-m", "tests.engine.ranks.workload", str(size), *models]
    own = {"OMP_NUM_THREADS": "1", STORE: str(folder / f"store-{size}")}
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    processes = [
        subprocess.Popen(
            command,
            env=environment | own | (place.variables() if size > 1 else {}),
            stdout=subprocess.PIPE if not place.rank else None,
        )
        for place in places
    ]
    try:
        printed, _ = processes[0].communicate(timeout=600)
        assert [process.wait(60) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
    return json.loads(printed.splitlines()[-1])


def assert_same_tokens(found, alone):
    assert found.keys() == alone.keys()
    for case, one in alone.items():
        assert found[case]["tokens"] == one["tokens"], case
        if case.endswith("swap"):
            assert found[case]["swapped"] > 0, case
        if case.endswith("recompute"):
            assert found[case]["recomputed"] > 0, case


def assert_half(found, alone):
    """Assert that each of two ranks holds about half of a block and of the weights."""
    for case, one in alone.items():
        assert found[case]["weight_bytes"] <= 0.55 * one["weight_bytes"], case
        if "few_key" not in case:
            assert found[case]["block_bytes"] <= 0.55 * one["block_bytes"], case


def test_two_ranks_give_the_tokens_of_one(tmp_path):
    models = save_models(QUICK, tmp_path)
    one, two = (run_ranks(size, models, tmp_path) for size in (1, 2))
    assert_same_tokens(two, one)
    assert_half(two, one)


@pytest.mark.slow
def test_all_families_give_the_same_on_two_and_four_ranks(tmp_path):
    models = save_models(MODELS, tmp_path)
    one, two, four = (run_ranks(size, models, tmp_path) for size in (1, 2, 4))
    assert_same_tokens(two, one)
    assert_half(two, one)
    assert_same_tokens(four, one)


@pytest.mark.slow
def test_the_demo_model_gives_the_same_on_three_ranks(demo_model, tmp_path):
    """It has 9 heads, and 3 of keys and values."""
    one, three = (run_ranks(size, [str(demo_model)], tmp_path) for size in (1, 3))
    assert_same_tokens(three, one)
    for case in one:
        assert three[case]["block_bytes"] * 3 == one[case]["block_bytes"]
