"""Features of requests and settings give the same results on two ranks as on one."""

import numpy as np
import pytest

from tests.engine.parallel.harness import (
    KINDS,
    TYPES,
    WITH_STATES,
    few_blocks,
    run_kind,
    run_ranks,
    save_models,
    save_tiny,
    score_errors,
    type_of,
)

STAGES = [1, pytest.param(2, marks=pytest.mark.slow)]


@pytest.mark.parametrize("stages", STAGES)
def test_features_give_the_same_in_float32(stages, tmp_path):
    """Masks of constraints, scores of prompts, drafted tokens and cached prompts."""
    (model,) = save_models(["qwen3"], tmp_path)
    given = {
        "masked scored": {},
        "repetitive again": {"speculation": "ngram", "enable_prefix_caching": True},
    }
    cases = {
        work: {"model": model, "work": work, "settings": settings, "stages": stages}
        for work, settings in given.items()
    }
    one, two = (run_ranks(size, cases, tmp_path) for size in (1, 2))
    for work in cases:
        assert two[work]["tokens"] == one[work]["tokens"], work
        assert np.abs(score_errors(two[work], one[work])).max(initial=0) < 1e-3
    masked, scored = two["masked scored"]["tokens"][:8], two["masked scored"]["scores"][8:]
    even = [outputs for i, outputs in enumerate(masked) if i % 4 < 2]
    assert not any(token % 2 for outputs in even for tokens in outputs for token in tokens)
    assert all(scored)
    ours, theirs = two["repetitive again"], one["repetitive again"]
    assert ours["tokens"][6:10] == ours["tokens"][10:]
    assert ours["cached"] == theirs["cached"] >= 4 * 32
    assert ours["accepted"] == theirs["accepted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_features_of_all_types_give_the_same(kind, tmp_path):
    """Constraints, scores of prompts, drafted tokens and cached prompts, in a short cache."""
    given = {}
    for model in save_tiny(TYPES, tmp_path):
        drafts = "off" if type_of(model) in WITH_STATES else "ngram"
        usual = {"speculation": drafts, "compile": "auto"}
        few = {"num_blocks": few_blocks(model, 24), "max_num_seqs": 24}
        short = {"max_num_batched_tokens": 40} | few
        for work, own in {"constrained scored": short, "repetitive again": {}}.items():
            case = {"model": model, "work": work, "settings": usual | own}
            given[f"{type_of(model)} {work}"] = case
    one, found = run_ranks(1, given, tmp_path), run_kind(kind, given, tmp_path)
    for case, alone in one.items():
        assert found[case]["tokens"] == alone["tokens"], case
        assert np.abs(score_errors(found[case], alone)).max(initial=0) < 1e-3, case
        if case.split()[0] not in WITH_STATES:  # a rank's blocks hold fewer bytes, its states not
            assert found[case]["cached"] == alone["cached"], case
        assert "again" not in case or found[case]["cached"] > 0, case
        assert found[case]["compiled"], case
    for name in set(TYPES) - WITH_STATES:  # forced tokens of constraints
        assert found[f"{name} constrained scored"]["accepted"] > 0, name


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_rounding_is_as_small_as_on_one_rank(stages, tmp_path):
    """Each rank rounds its own part, so outputs differ, but not by more than on one rank.

    The checkpoint is in float32, so its weights are rounded too.
    """
    (model,) = save_models(["wide"], tmp_path)
    rounding = {
        name: {"dtype": "bfloat16", "quantization": name} for name in ("none", "int8", "int4")
    } | {
        "int8 cache": {"kv_cache_dtype": "int8", "block_size": 16},
        "fp8 cache": {"kv_cache_dtype": "fp8"},
    }
    given = {
        name: {"model": model, "work": "scored", "settings": own, "stages": stages}
        for name, own in ({"exact": {}} | rounding).items()
    }
    one, two = (run_ranks(size, given, tmp_path) for size in (1, 2))
    for name in rounding:
        of_one, of_two = (
            np.sqrt(np.mean(score_errors(found[name], one["exact"]) ** 2)) for found in (one, two)
        )
        assert 0 < of_two < 1.5 * of_one + 0.005, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["two ranks", "two stages of two"])
def test_a_draft_model_on_rank_0_drafts_for_all(kind, tmp_path):
    """The draft model is the model itself, so nearly all drafted tokens are accepted."""
    (model,) = save_models(["llama"], tmp_path)
    drafting = {"speculation": "draft", "draft_model": model, "num_speculative_tokens": 3}
    given = {
        name: {"model": model, "work": "mixed repetitive", "settings": settings}
        for name, settings in {"alone": {}, "drafting": drafting}.items()
    }
    one, found = run_ranks(1, given, tmp_path), run_kind(kind, given, tmp_path)
    assert found["drafting"]["tokens"] == one["alone"]["tokens"]
    assert found["drafting"]["accepted"] > 0.9 * one["drafting"]["accepted"] > 0
