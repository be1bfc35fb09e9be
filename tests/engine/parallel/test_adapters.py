"""Ranks and stages apply their parts of adapters: they sample the tokens of one process."""

import pytest

from tests.engine.lora.conftest import CONFIGS
from tests.engine.parallel.harness import MODELS, run_ranks, save_models
from tests.engine.parallel.test_equality import assert_same_tokens
from tests.engine.parallel.test_stages import in_stages
from tests.peft_adapters import save_adapter

ALL = {"r": 6, "target_modules": "all-linear"}
ATTENTION = {"r": 5, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
HEAD = {"r": 8, "target_modules": ["lm_head", "q_proj"]}
QUICK = ("few key and value heads",)
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
