"""What requests and settings may ask for gives the same on two ranks as on one."""

import numpy as np
import pytest

from tests.engine.ranks.harness import run_ranks, save_models, score_errors


def test_features_give_the_same_in_float32(tmp_path):
    """Masks of constraints, drafted tokens, cached prompts and scores of prompts."""
    (model,) = save_models(["qwen3"], tmp_path)
    settings = {"speculation": "ngram", "enable_prefix_caching": True}
    given = {"all": {"model": model, "work": "features", "settings": settings}}
    one, two = (run_ranks(size, given, tmp_path)["all"] for size in (1, 2))
    assert two["tokens"] == one["tokens"]
    masked, again, scored = (
        two["tokens"][part] for part in (slice(8), slice(14, 22), slice(22, 28))
    )
    even = [outputs for i, outputs in enumerate(masked) if i % 4 < 2]
    assert not any(token % 2 for outputs in even for tokens in outputs for token in tokens)
    assert again[:4] == again[4:]
    assert two["cached"] == one["cached"] >= 4 * 32
    assert two["accepted"] == one["accepted"] > 0
    assert len(scored) == 6
    assert np.abs(score_errors(two, one)).max() < 1e-3


@pytest.mark.slow
def test_rounding_is_as_small_as_on_one_rank(tmp_path):
    """Each rank rounds its part by itself, so outputs differ; but not by more than on one.

    The checkpoint is in float32, so its weights are rounded too.
    """
    (model,) = save_models(["wide"], tmp_path)
    settings = {"exact": {}} | {
        name: {"dtype": "bfloat16", "quantization": name} for name in ("none", "int8", "int4")
    }
    given = {
        name: {"model": model, "work": "scored", "settings": own} for name, own in settings.items()
    }
    one, two = (run_ranks(size, given, tmp_path) for size in (1, 2))
    for name in ("none", "int8", "int4"):
        of_one, of_two = (
            np.sqrt(np.mean(score_errors(found[name], one["exact"]) ** 2)) for found in (one, two)
        )
        assert 0 < of_two < 1.5 * of_one + 0.005, name
