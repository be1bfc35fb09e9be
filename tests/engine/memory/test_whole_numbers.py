"""An engine with a KV cache of whole numbers on a CPU."""

import pytest
import torch

from octavo.engine.scheduling.request import BeamSearch
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.stepper import Stepper

PROMPTS = [[3 + i] * 5 + list(range(7, 7 + 23 * i)) for i in range(4)]
ROOMY = {"num_blocks": 200, "enable_prefix_caching": False}


@pytest.fixture
def engine(tiny_model):
    def make(kv_cache_dtype="int8", **settings):
        given = {"num_blocks": 64, "swap_space": 0.01, "dtype": "bfloat16"}
        given |= {"model": str(tiny_model), "kv_cache_dtype": kv_cache_dtype} | settings
        return Stepper(build(EngineSettings(**given)))

    return make


def outputs(stepper, **request):
    groups = [stepper.submit(prompt, 30, **request) for prompt in PROMPTS]
    stepper.run()
    return [sequence.token_ids for group in groups for sequence in group.sequences]


@pytest.mark.parametrize(("kept_as", "tolerance"), [("int8", 0.05)])
def test_it_gives_like_logits(engine, kept_as, tolerance):
    groups = []
    for stepper in (engine("auto"), engine(kept_as)):
        groups.append(stepper.submit(PROMPTS[-1], 2, prompt_logprobs=1))
        stepper.run()
    ours, theirs = (
        torch.tensor([found.logprob for found in group.prompt_logprobs]) for group in groups
    )
    assert 0 < (ours - theirs).abs().max() < tolerance


@pytest.mark.parametrize("kept_as", ["int8"])
def test_every_way_to_a_cache_gives_the_same_tokens(engine, kept_as):
    plain = outputs(engine(kept_as, **ROOMY), n=2, temperature=0.9, seed=5)
    for way in (
        {"num_blocks": 14, "preemption": "swap"},
        {"num_blocks": 14, "preemption": "recompute"},
        {"max_num_batched_tokens": 16},
        {"speculation": "ngram"},
    ):
        stepper = engine(kept_as, **ROOMY | way)
        assert outputs(stepper, n=2, temperature=0.9, seed=5) == plain, way
        if way.get("preemption") == "swap":
            assert any(batch.transfers.swap_in for batch in stepper.batches)
    cached = engine(kept_as, num_blocks=200)
    for _ in range(2):
        assert outputs(cached, n=2, temperature=0.9, seed=5) == plain
    assert outputs(engine(kept_as, **ROOMY), beam=BeamSearch(3)) == outputs(
        engine(kept_as, **ROOMY | {"num_blocks": 16, "preemption": "swap"}), beam=BeamSearch(3)
    )
