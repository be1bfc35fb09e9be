"""Several ranks give the tokens of one rank, even when memory is short."""

import pytest

from tests.engine.parallel.harness import MODELS, run_ranks, save_models

MODES = {
    "ample": {},
    "swap": {"preemption": "swap"},
    "recompute": {"preemption": "recompute"},
}
QUICK = ("few key and value heads", "mixtral")


def cases(models, num_blocks=96):
    return {
        f"{model} {mode}": {
            "model": model,
            "settings": settings if mode == "ample" else settings | {"num_blocks": num_blocks},
        }
        for model in models
        for mode, settings in MODES.items()
    }


def assert_same_tokens(found, alone, calm=()):
    """Assert the tokens of one process, and preemptions of all models but those in `calm`."""
    assert found.keys() == alone.keys()
    for case, one in alone.items():
        assert found[case]["tokens"] == one["tokens"], case
        if case.startswith(calm):
            continue
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
    given = cases(save_models(QUICK, tmp_path))
    one, two = (run_ranks(size, given, tmp_path) for size in (1, 2))
    assert_same_tokens(two, one)
    assert_half(two, one)


@pytest.mark.slow
def test_all_families_give_the_same_on_two_and_four_ranks(tmp_path):
    given = cases(save_models(MODELS, tmp_path))
    one, two, four = (run_ranks(size, given, tmp_path) for size in (1, 2, 4))
    assert_same_tokens(two, one)
    assert_half(two, one)
    assert_same_tokens(four, one)


@pytest.mark.slow
def test_the_demo_model_gives_the_same_on_three_ranks(demo_model, tmp_path):
    """The model has 9 heads, and 3 KV heads."""
    given = cases([str(demo_model)])
    one, three = (run_ranks(size, given, tmp_path) for size in (1, 3))
    assert_same_tokens(three, one)
    for case in one:
        assert three[case]["block_bytes"] * 3 == one[case]["block_bytes"]
