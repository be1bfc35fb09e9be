"""Stages sample the same tokens as one process; each stage holds some of the layers."""

import pytest
from transformers import LlamaConfig

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.models.sharding.stages import balance, plan_stages
from tests.engine.parallel.harness import (
    KINDS,
    MODELS,
    TYPES,
    few_blocks,
    run_kind,
    run_ranks,
    save_models,
    save_tiny,
)
from tests.engine.parallel.test_equality import assert_same_tokens, cases
from tools import rank_table

SMALL = {"vocab_size": 500, "hidden_size": 72, "intermediate_size": 144, "num_attention_heads": 4}


def in_stages(given, stages):
    return {name: case | {"stages": stages} for name, case in given.items()}


def test_the_documents_name_what_ranks_serve():
    text = rank_table.PLACE.document.read_text()
    assert rank_table.PLACE.insert(text, rank_table.markdown()) == text, "make docs"


def test_layers_are_balanced_by_memory():
    assert balance([1, 1, 1, 1], 2) == [2, 2]
    assert balance([5, 1, 1, 1, 1, 3], 2) in ([1, 5], [2, 4])
    assert balance([1] * 7, 3) in ([2, 2, 3], [1, 3, 3])
    assert balance([9, 1, 1], 3) == [1, 1, 1]
    config = LlamaConfig(**SMALL, num_hidden_layers=6)
    assert plan_stages(config, 2, ()) == [range(3), range(3, 6)]
    assert plan_stages(config, 2, (2, 4)) == [range(2), range(2, 6)]


def test_what_stages_cannot_serve_is_refused_by_name():
    config = LlamaConfig(**SMALL, num_hidden_layers=3)
    with pytest.raises(UnsupportedModelError, match="split has 4 layers, but the model has 3"):
        plan_stages(config, 2, (2, 2))
    with pytest.raises(UnsupportedModelError, match="size is 4, but the model has 3 layers"):
        plan_stages(config, 4, ())


def test_two_stages_give_the_tokens_of_one_process(tmp_path):
    given = cases(save_models(["llama"], tmp_path))
    traced = {name: case | {"settings": case["settings"]} for name, case in given.items()}
    one = run_ranks(1, given, tmp_path)
    two = run_ranks(2, in_stages(traced, 2), tmp_path)
    assert_same_tokens(two, one)
    for case, alone in one.items():
        assert two[case]["block_bytes"] * 2 == alone["block_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_latents_sinks_windows_and_states_give_the_same(kind, mode, tmp_path):
    given = {}
    for model in save_tiny(TYPES, tmp_path):
        for name, case in cases([model], few_blocks(model, 96)).items():
            given[name] = case | {"settings": case["settings"] | {"compile": mode}}
    assert_same_tokens(run_kind(kind, given, tmp_path), run_ranks(1, given, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), [(2, 2), (4, 2)])
def test_all_families_give_the_same_in_stages(size, stages, tmp_path):
    given = cases(save_models(MODELS, tmp_path))
    one = run_ranks(1, given, tmp_path)
    assert_same_tokens(run_ranks(size, in_stages(given, stages), tmp_path), one)
