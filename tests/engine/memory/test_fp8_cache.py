"""An engine with an fp8 KV cache on a CPU."""

import pytest
import torch

from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.stepper import Stepper

PROMPTS = [[3 + i] * 5 + list(range(7, 7 + 11 * i)) for i in range(4)]


@pytest.fixture
def engine(tiny_model):
    def make(kv_cache_dtype, **settings):
        given = {"num_blocks": 64, "swap_space": 0.01, "dtype": "float32", "compile": "off"}
        given |= {"model": str(tiny_model), "kv_cache_dtype": kv_cache_dtype} | settings
        return Stepper(build(EngineSettings(**given)))

    return make


@pytest.mark.parametrize(("kv_cache_dtype", "tolerance"), [("fp8_e4m3", 0.1), ("fp8_e5m2", 0.2)])
def test_it_takes_a_quarter_of_float32s_memory_and_gives_like_logits(
    engine, kv_cache_dtype, tolerance
):
    wide, narrow = engine("auto"), engine(kv_cache_dtype)
    assert narrow.parts.block_bytes * 4 == wide.parts.block_bytes
    groups = [stepper.submit(PROMPTS[-1], 2, prompt_logprobs=1) for stepper in (wide, narrow)]
    for stepper in (wide, narrow):
        stepper.run()
    ours, theirs = (
        torch.tensor([found.logprob for found in group.prompt_logprobs]) for group in groups
    )
    assert 0 < (ours - theirs).abs().max() < tolerance


def test_swapped_blocks_come_back_as_they_were(engine):
    def outputs(stepper):
        groups = [stepper.submit(prompt, 30, n=2, temperature=0.9, seed=5) for prompt in PROMPTS]
        stepper.run()
        return [sequence.token_ids for group in groups for sequence in group.sequences]

    tight = engine("fp8_e4m3", num_blocks=24, preemption="swap", block_size=8)
    assert outputs(tight) == outputs(engine("fp8_e4m3", num_blocks=200, block_size=8))
    assert any(batch.transfers.swap_in for batch in tight.batches)
