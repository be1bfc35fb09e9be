"""Ranks run compiled: the same as uncompiled, from the same step on, and all or none."""

import pytest

from octavo.common.models.cache import cache_dir
from tests.engine.ranks.harness import run_ranks, save_models, score_errors


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    (cache / "kernels").symlink_to(cache_dir() / "kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE_DIR", str(cache))
        yield


def cases(models, work="mixed", **settings):
    return {model: {"model": model, "work": work, "settings": settings} for model in models}


TRANSLATE = "tests.engine.ranks.translating_export"


BOTH = {"0": TRANSLATE, "1": TRANSLATE}


def run_translated(folder, settings=None, **engines):
    """Run engines of two ranks in turn; each argument is a compile mode and its compilers."""
    (model,) = save_models(["wide"], folder)
    given = {
        name: {
            "model": model,
            "work": "scored",
            "settings": {"dtype": "bfloat16", "compile": mode, **(settings or {})},
            "compilers": compilers,
        }
        for name, (mode, compilers) in engines.items()
    }
    return run_ranks(2, given, folder)


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"quantization": "int8"}]
)
def test_translated_ranks_say_what_others_say(settings, tmp_path):
    found = run_translated(tmp_path, settings, off=("off", {}), first=("wait", BOTH))
    assert [one["compiled"][0] for one in found.values()] == [False, True]
    assert abs(score_errors(found["first"], found["off"])).max() < 0.1


@pytest.mark.slow  # translates three times
def test_all_ranks_run_translated_or_none_does(tmp_path):
    """Rank 1 fails at first. The last engine loads what the one before has translated."""
    found = run_translated(
        tmp_path,
        off=("off", {}),
        failed=("wait", BOTH | {"1": "no.such.module"}),
        first=("wait", BOTH),
        second=("auto", BOTH),
    )
    assert [one["compiled"][0] for one in found.values()] == [False, False, True, True]
    assert found["failed"]["scores"] == found["off"]["scores"]
    for result in ("tokens", "scores"):
        assert found["second"][result] == found["first"][result]


@pytest.mark.slow  # compiles for a minute
def test_compiled_ranks_give_the_tokens_of_one_rank(tmp_path):
    """The second engine loads what the first has compiled, and serves with it from the start."""
    models = save_models(["qwen3"], tmp_path)
    alone = run_ranks(1, cases(models, compile="off"), tmp_path)
    (model,) = models
    (first,) = cases(models, compile="wait").values()
    (second,) = cases(models, compile="auto").values()
    found = run_ranks(2, {"first": first, "second": second}, tmp_path)
    for one in found.values():
        assert one["compiled"] == [True, True]
        assert one["tokens"] == alone[model]["tokens"]


@pytest.mark.slow  # compiles for minutes
def test_compiled_families_give_the_tokens_of_one_rank(tmp_path):
    models = save_models(["few key and value heads", "gemma3", "gpt2", "mixtral"], tmp_path)
    alone = run_ranks(1, cases(models, compile="off"), tmp_path)
    found = run_ranks(2, cases(models, compile="wait"), tmp_path)
    for model, one in alone.items():
        assert found[model]["compiled"] == [True, True], model
        assert found[model]["tokens"] == one["tokens"], model


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"quantization": "int4"}])
def test_compiled_ranks_in_bfloat16_say_what_uncompiled_ones_say(settings, tmp_path):
    models = save_models(["wide"], tmp_path)
    given = {"work": "scored", "dtype": "bfloat16", **settings}
    eager = run_ranks(2, cases(models, compile="off", **given), tmp_path)
    compiled = run_ranks(2, cases(models, compile="wait", **given), tmp_path)
    (model,) = models
    assert compiled[model]["compiled"] == [True, True]
    assert abs(score_errors(compiled[model], eager[model])).max() < 0.1


@pytest.mark.slow
def test_ranks_begin_to_run_compiled_in_the_middle_of_streams(tmp_path):
    models = save_models(["llama"], tmp_path)
    alone = run_ranks(1, cases(models, work="long"), tmp_path)
    found = run_ranks(2, cases(models, work="through_a_switch", compile="auto"), tmp_path)
    (model,) = models
    assert found[model]["compiled"] == [False, True]
    for i, tokens in enumerate(found[model]["tokens"]):
        assert tokens == alone[model]["tokens"][i % 4]
