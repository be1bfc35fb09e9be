"""Traced ranks give the outputs of eager ranks and of one rank."""

import pytest

from tests.engine.parallel.harness import run_ranks, save_models, score_errors

QUICK = ["qwen3"]
FAMILIES = ["few key and value heads", "gemma3", "gpt2", "mixtral"]


def cases(models, work="mixed", **settings):
    return {model: {"model": model, "work": work, "settings": settings} for model in models}


@pytest.mark.parametrize("names", [QUICK, pytest.param(FAMILIES, marks=pytest.mark.slow)])
def test_traced_ranks_give_the_tokens_of_one_rank(names, tmp_path):
    models = save_models(names, tmp_path)
    alone = run_ranks(1, cases(models, compile="off"), tmp_path)
    found = run_ranks(2, cases(models, compile="auto"), tmp_path)
    for model, one in alone.items():
        assert found[model]["compiled"], model
        assert found[model]["tokens"] == one["tokens"], model


@pytest.mark.parametrize(
    "quantization",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "int4")), "int8"],
)
def test_traced_ranks_in_bfloat16_say_what_eager_ones_say(quantization, tmp_path):
    (model,) = save_models(["wide"], tmp_path)
    given = {"dtype": "bfloat16", "quantization": quantization}
    modes = {
        mode: {"model": model, "work": "scored", "settings": {"compile": mode, **given}}
        for mode in ("off", "auto")
    }
    found = run_ranks(2, modes, tmp_path)
    assert [one["compiled"] for one in found.values()] == [False, True]
    assert abs(score_errors(found["auto"], found["off"])).max() < 0.1


@pytest.mark.slow
def test_a_rank_that_cannot_be_traced_runs_beside_one_that_is(tmp_path):
    models = save_models(["qwen3"], tmp_path)
    alone = run_ranks(1, cases(models, compile="off"), tmp_path)
    given = {model: case | {"eager": [1]} for model, case in cases(models, compile="auto").items()}
    found = run_ranks(2, given, tmp_path)
    (model,) = models
    assert found[model]["compiled"]
    assert found[model]["tokens"] == alone[model]["tokens"]
