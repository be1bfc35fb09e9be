"""Stages sample the same tokens as one process; each stage holds some of the layers."""

import pytest
from transformers import LlamaConfig

from octavo.common.models.errors import UnsupportedModelError
from octavo.engine.models.sharding.stages import balance, plan_stages
from tests.architectures.entries import OVERRIDES
from tests.architectures.tiny import make_model, tiny_config
from tests.engine.parallel.harness import MODELS, run_ranks, save_models
from tests.engine.parallel.test_equality import assert_same_tokens, cases
from tests.engine.parallel.workload import VOCABULARY
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


OTHERS = ("qwen3_moe", "deepseek_v3", "gpt_oss", "gemma3_text", "falcon_h1", "qwen3_next")


def save_tiny(names, folder):
    """Save tiny models of some types; return their paths."""
    for name in names:
        config = tiny_config(name, OVERRIDES.get(name, {}) | {"vocab_size": VOCABULARY})
        make_model(config).save_pretrained(folder / name)
    return [str(folder / name) for name in names]


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Return the paths of models with experts, latents, windows and states."""
    return save_tiny(OTHERS, tmp_path_factory.mktemp("models"))


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "mode"), [(2, "auto"), (2, "off"), (4, "off")])
def test_experts_latents_windows_and_states_give_the_same_in_stages(stages, mode, others, tmp_path):
    given = {
        name: case | {"settings": case["settings"] | {"compile": mode}}
        for name, case in cases(others, num_blocks=192).items()
    }
    one = run_ranks(1, given, tmp_path)
    found = run_ranks(stages, in_stages(given, stages), tmp_path)
    for case, alone in one.items():
        assert found[case]["tokens"] == alone["tokens"], case
    assert any(case["swapped"] for case in found.values())
    assert any(case["recomputed"] for case in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (4, 2)])
def test_experts_latents_windows_and_states_give_the_same_on_ranks(size, stages, others, tmp_path):
    with_plan = [path for path in others if "gpt_oss" not in path]
    given = cases(with_plan, num_blocks=192)
    one = run_ranks(1, given, tmp_path)
    found = run_ranks(size, in_stages(given, stages), tmp_path)
    for case, alone in one.items():
        assert found[case]["tokens"] == alone["tokens"], case
    assert any(case["swapped"] for case in found.values())
    assert any(case["recomputed"] for case in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(("size", "stages"), [(2, 2), (4, 2)])
def test_all_families_give_the_same_in_stages(size, stages, tmp_path):
    given = cases(save_models(MODELS, tmp_path))
    one = run_ranks(1, given, tmp_path)
    assert_same_tokens(run_ranks(size, in_stages(given, stages), tmp_path), one)
