"""Ranks check a large model with a small twin, which they divide as they do the model."""

import pytest

from tests.engine.parallel.harness import MODELS, TYPES, run_ranks, save_models, save_tiny
from tests.engine.parallel.test_experts import WHOLE

CHECKED = {"work": "scored", "large": True, "settings": {"dtype": "bfloat16"}}


def assert_checked(size, given, folder):
    results = run_ranks(size, given, folder)
    assert {name: case["twins"] for name, case in results.items()} == {
        name: [True] for name in given
    }


def test_two_ranks_divide_a_twin(tmp_path):
    dense, mixture = save_models(["few key and value heads", "mixtral"], tmp_path)
    whole = CHECKED | {"model": mixture, "settings": CHECKED["settings"] | WHOLE}
    given = {"dense": CHECKED | {"model": dense}, "whole experts": whole}
    assert_checked(2, given, tmp_path)


def test_whole_experts_in_bfloat16_pass_the_checks(tmp_path):
    """The check in float32 runs transformers' own code of experts."""
    (mixture,) = save_models(["mixtral"], tmp_path)
    settings = CHECKED["settings"] | WHOLE
    found = run_ranks(2, {"whole": {"model": mixture, "settings": settings}}, tmp_path)
    assert found["whole"]["tokens"]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 2), (2, 2)])
def test_all_families_divide_a_twin(size, stages, tmp_path):
    models = save_models(MODELS, tmp_path) + save_tiny(TYPES[1:], tmp_path)  # but llama
    given = {model: CHECKED | {"model": model, "stages": stages} for model in models}
    assert_checked(size, given, tmp_path)
