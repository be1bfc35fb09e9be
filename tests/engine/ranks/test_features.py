"""What requests and settings may ask for gives the same on two ranks as on one."""

import numpy as np
import pytest

from tests.engine.ranks.harness import run_ranks, save_models, score_errors


def both(tmp_path, given):
    """Run cases on one rank and on two."""
    return (run_ranks(size, given, tmp_path) for size in (1, 2))


def test_features_give_the_same_in_float32(tmp_path):
    """Masks of constraints, drafted tokens, cached prompts and scores of prompts."""
    (model,) = save_models(["qwen3"], tmp_path)
    settings = {"repetitive": {"speculation": "ngram"}, "again": {"enable_prefix_caching": True}}
    one, two = both(
        tmp_path,
        {
            work: {"model": model, "work": work, "settings": settings.get(work, {})}
            for work in ("masked", "repetitive", "again", "scored")
        },
    )
    for work, alone in one.items():
        assert two[work]["tokens"] == alone["tokens"], work
    even = [g for i, g in enumerate(two["masked"]["tokens"]) if i % 4 < 2]
    assert not any(token % 2 for group in even for tokens in group for token in tokens)
    assert two["repetitive"]["accepted"] == one["repetitive"]["accepted"] > 0
    assert two["again"]["cached"] == one["again"]["cached"] >= 4 * 32
    half = len(two["again"]["tokens"]) // 2
    assert two["again"]["tokens"][:half] == two["again"]["tokens"][half:]
    assert np.abs(score_errors(two["scored"], one["scored"])).max() < 1e-3


@pytest.mark.parametrize(
    "dtype_and_quantization", ["bfloat16 none", "bfloat16 int8", "bfloat16 int4"]
)
def test_rounding_is_as_small_as_on_one_rank(dtype_and_quantization, tmp_path):
    """Each rank rounds its part by itself, so outputs differ; but not by more than on one."""
    dtype, quantization = dtype_and_quantization.split()
    (model,) = save_models(["wide"], tmp_path)
    rounded = {"dtype": dtype, "quantization": quantization}
    given = {
        name: {"model": model, "work": "scored", "settings": settings}
        for name, settings in {"exact": {}, "rounded": rounded}.items()
    }
    one, two = both(tmp_path, given)
    of_one, of_two = (
        np.sqrt(np.mean(score_errors(found["rounded"], one["exact"]) ** 2)) for found in (one, two)
    )
    assert 0 < of_two < 1.5 * of_one + 0.005
