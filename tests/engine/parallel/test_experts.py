"""Ranks with whole experts give the tokens of one process."""

import pytest
from transformers import LlamaConfig

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.models.sharding.plan import make_plan
from tests.engine.parallel.harness import COMMON, run_ranks, save_models, save_tiny
from tests.engine.parallel.test_equality import assert_same_tokens, cases
from tests.engine.parallel.test_stages import in_stages

WHOLE = {"expert_parallel": True}


def with_whole_experts(given):
    return {name: case | {"settings": case["settings"] | WHOLE} for name, case in given.items()}


def test_a_model_without_experts_is_refused():
    with pytest.raises(UnsupportedModelError, match="'llama' have no experts"):
        make_plan(LlamaConfig(**COMMON), 2, whole_experts=True)


@pytest.mark.parametrize("mode", ["auto", pytest.param("off", marks=pytest.mark.slow)])
def test_two_ranks_with_whole_experts_give_the_tokens_of_one(mode, tmp_path):
    given = {
        name: case | {"settings": case["settings"] | {"compile": mode}}
        for name, case in cases(save_models(["mixtral"], tmp_path)).items()
    }
    one = run_ranks(1, given, tmp_path)
    two = run_ranks(2, with_whole_experts(given), tmp_path)
    assert_same_tokens(two, one)
    for case, alone in one.items() if mode == "off" else ():
        assert two[case]["weight_bytes"] <= 0.55 * alone["weight_bytes"], case


@pytest.mark.slow
def test_whole_experts_in_two_stages_give_the_same(tmp_path):
    given = cases(save_tiny(("qwen3_moe",), tmp_path))
    one = run_ranks(1, given, tmp_path)
    assert_same_tokens(run_ranks(4, in_stages(with_whole_experts(given), 2), tmp_path), one)
