"""Which batch sizes are recorded, and that padding to them changes nothing."""

import itertools

import pytest

from engine.config import EngineSettings
from engine.executor.cuda_graphs import MAX_BATCH, ladder
from engine.startup import build
from tests.engine.stepper import Stepper


@pytest.mark.parametrize("most", [1, 3, 8, 100, 128, 256, 1000])
def test_the_ladder_ends_with_the_batch_and_wastes_little(most):
    rungs = ladder(most)
    assert rungs[-1] == min(max(most, 2), MAX_BATCH)
    assert rungs == sorted(set(rungs))
    for below, rung in itertools.pairwise(rungs):
        assert rung - below - 1 <= max(7, below / 4)


def run(tiny_model, record=None):
    """Decodes of unlike lengths: the batch shrinks from rung to rung."""
    settings = {"dtype": "float32", "num_blocks": 64, "swap_space": 0.01, "max_num_seqs": 6}
    stepper = Stepper(build(EngineSettings(model=str(tiny_model), **settings)))
    if record:
        stepper.parts.executor.record_decodes(max_num_seqs=6, max_model_len=128, record=record)
    prompts = [[7, 8, 9], list(range(3, 40)), [5], [11] * 20, [13, 14]]
    groups = [
        stepper.submit(prompt, 2 + 2 * i, eos=[2], min_tokens=2 + 2 * i)
        for i, prompt in enumerate(prompts)
    ]
    groups.append(stepper.submit([9, 8, 7], 3, prompt_logprobs=1))
    stepper.run()
    return [group.sequences[0].token_ids for group in groups]


def test_decodes_that_are_replayed_are_as_others(tiny_model):
    replayed = []

    def record(work):
        """As on a GPU, but for speed: done again, on inputs that stay where they are."""

        def replay():
            logits = work()
            replayed.append(len(logits))
            return logits

        return replay

    assert run(tiny_model, record) == run(tiny_model)
    assert set(replayed) == {2, 4, 6}
