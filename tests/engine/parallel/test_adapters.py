"""Ranks and stages apply their parts of adapters: they sample the tokens of one process."""

import pytest
import torch
from transformers import AutoConfig

from octavo.engine.lora.adapted_model import linear_layers
from octavo.engine.models.empty_model import make_empty
from tests.engine.lora.conftest import CONFIGS
from tests.engine.parallel.harness import (
    KINDS,
    MODELS,
    TYPES,
    WITH_STATES,
    few_blocks,
    run_kind,
    run_ranks,
    save_models,
    save_tiny,
    type_of,
)
from tests.engine.parallel.test_equality import assert_same_tokens
from tests.engine.parallel.test_stages import in_stages
from tests.peft_adapters import save_adapter, write_adapter

ALL = {"r": 6, "target_modules": "all-linear"}
ATTENTION = {"r": 5, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
HEAD = {"r": 8, "target_modules": ["lm_head", "q_proj"]}
QUICK = ("few key and value heads",)
EXPANSION = "kv_b_proj"
"""The expansion of latents, which adapters may not adapt."""
SHORT = {"num_blocks": 32, "preemption": "swap", "speculation": "suffix"}


def save_adapters(model, folder, configs):
    """Save adapters of a model; return the setting that loads them."""
    return [
        f"{name}={save_adapter(model, folder / name, seed=seed, **config)}"
        for seed, (name, config) in enumerate(configs.items())
    ]


def cases(paths, folder, configs, **settings):
    """Return a case of swapped requests with drafts for each model."""
    given = {}
    for path in paths:
        lora = save_adapters(path, folder / f"adapters of {path.rpartition('/')[2]}", configs)
        own = SHORT | settings | {"lora": lora}
        given[f"{path} swap"] = {"model": path, "work": "adapted", "settings": own}
    return given


@pytest.mark.parametrize("stages", [1, 2])
def test_two_ranks_apply_adapters_as_one_does(stages, tmp_path):
    given = cases(save_models(QUICK, tmp_path), tmp_path, CONFIGS, compile="auto")
    (drafted,) = given.values()
    plain = drafted["settings"] | {"speculation": "off"}
    given["masked"] = drafted | {"work": "masked", "settings": plain}
    one, two = (run_ranks(size, in_stages(given, stages), tmp_path) for size in (1, 2))
    assert_same_tokens(two, one)
    drafted, masked = two.values()
    assert drafted["accepted"] > 0
    assert drafted["compiled"]
    assert masked["compiled"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 2)])
def test_all_families_apply_adapters_on_ranks(size, stages, tmp_path):
    tied = {"qwen3", "gemma3", "gpt2"}  # their head is the embeddings
    given = {}
    for name in MODELS:
        head = {} if name in tied else {"head": HEAD}
        usual = ATTENTION if name == "mixtral" else ALL
        given |= cases(save_models([name], tmp_path), tmp_path, {"usual": usual} | head)
    one = run_ranks(1, given, tmp_path)
    assert_same_tokens(run_ranks(size, in_stages(given, stages), tmp_path), one)


def write_adapters(model, folder):
    """Write an adapter of all layers that may have one and another of some; see `save_adapters`."""
    empty = make_empty(AutoConfig.from_pretrained(model), torch.float32)
    layers = {
        name: target.sizes
        for name, target in linear_layers(empty).items()
        if not name.endswith(EXPANSION)
    }
    some = {name: sizes for i, (name, sizes) in enumerate(layers.items()) if i % 3 == 0}
    given = {"all": (layers, 5), "some": (some, 16)}
    return [
        f"{name}={write_adapter(folder / name, own, rank=rank, seed=rank, std=0.1)}"
        for name, (own, rank) in given.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_latents_states_and_sinks_take_adapters(kind, tmp_path):
    """With drafts, constraints, swap, recomputing and chunks of prompts."""
    given = {}
    for model in save_tiny(TYPES, tmp_path):
        name = type_of(model)
        lora = write_adapters(model, tmp_path / f"adapters of {name}")
        drafts = "off" if name in WITH_STATES else "ngram"
        usual = {"lora": lora, "speculation": drafts, "compile": "auto", "max_num_seqs": 24}
        short = {
            "num_blocks": few_blocks(model, 20 if name in WITH_STATES else 24),
            "max_num_batched_tokens": 40,
        }
        for mode in ("swap", "recompute"):
            settings = usual | short | {"preemption": mode}
            work = "adapted constrained"
            given[f"{name} {mode}"] = {"model": model, "work": work, "settings": settings}
    one, found = run_ranks(1, given, tmp_path), run_kind(kind, given, tmp_path)
    assert_same_tokens(found, one, calm=("qwen3_next",))  # few of its requests fit at once
