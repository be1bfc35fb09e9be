"""Beam search is transformers' own: the same hypotheses with the same scores."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.engine.scheduling.request import BeamSearch
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.conftest import STOPPING
from tests.engine.stepper import Stepper

PROMPTS = 32
OUTPUT_TOKENS = 14
CASES = [
    *((2, 0.6, False), (2, 1.0, True), (4, 0.6, True), (4, 2.0, False)),
    *((8, 1.0, False), (8, 2.0, True)),
]
"""Every width, length penalty and early stopping; the last two in every combination."""


@pytest.fixture(scope="module")
def engine(decided_model):
    def make(**settings):
        settings = {"num_blocks": 2048, "swap_space": 0.05, "dtype": "float32"} | settings
        return Stepper(build(EngineSettings(model=str(decided_model), **settings)))

    return make


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 500, (3 + i,), generator=generator).tolist() for i in range(PROMPTS)]


def search_with(model, prompts, search, eos, max_new_tokens=OUTPUT_TOKENS):
    """Return generate()'s hypotheses and scores for every prompt."""
    width = max(map(len, prompts))
    output = model.generate(
        torch.tensor([[0] * (width - len(p)) + p for p in prompts]),
        attention_mask=torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=search.width,
        num_return_sequences=search.width,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    tokens = output.sequences[:, width:].unflatten(0, (-1, search.width)).tolist()
    return tokens, output.sequences_scores.unflatten(0, (-1, search.width)).tolist()


def assert_same(groups, expected):
    for group, tokens, scores in zip(groups, *expected, strict=True):
        found = group.beam.hypotheses
        for hypothesis, theirs in zip(found, tokens, strict=True):
            length = len(hypothesis.token_ids)
            assert hypothesis.token_ids == theirs[:length]
            assert len(set(theirs[length:])) <= 1, "more than padding follows"
        assert [hypothesis.score for hypothesis in found] == pytest.approx(scores, abs=1e-4)


@pytest.mark.few(2)
@pytest.mark.parametrize(("width", "penalty", "early"), CASES)
def test_hypotheses_and_scores_are_transformers(
    engine, decided_model, prompts, width, penalty, early
):
    search = BeamSearch(width, penalty, early)
    calm = engine(num_blocks=1000, max_num_seqs=256, max_num_batched_tokens=512)
    tight = engine(num_blocks=4 + 3 * width, preemption="swap" if early else "recompute")
    results = []
    for one, some in ((calm, prompts), (tight, prompts[:8])):
        results.append([one.submit(p, OUTPUT_TOKENS, eos=STOPPING, beam=search) for p in some])
        one.run()
    model = AutoModelForCausalLM.from_pretrained(decided_model, dtype=torch.float32)
    expected = search_with(model, prompts, search, STOPPING)
    if penalty < 1:
        lengths = {len(h.token_ids) for group in results[0] for h in group.beam.hypotheses}
        assert len(lengths) > 3, "hypotheses should end at many lengths"
    assert_same(results[0], expected)
    assert_same(results[1], [part[:8] for part in expected])
    counters = tight.scheduler.counters
    assert (counters["preemptions_swap"] if early else counters["preemptions_recompute"]) > 0


@pytest.mark.parametrize(
    "outputs",
    [{"n": 8, "temperature": 1.0}, {"beam": BeamSearch(8)}, {"beam": BeamSearch(2)}],
    ids=["8 samples", "8 beams", "2 beams"],
)
def test_outputs_share_the_prompt(engine, outputs):
    """The prompt's 500 tokens are stored once; each output adds only its own blocks."""
    one = engine(enable_prefix_caching=False)
    prompt = torch.randint(3, 500, (490,)).tolist()
    group = one.submit(prompt, 20, **outputs)
    used = 0
    while not one.scheduler.idle:
        one.step()
        used = max(used, one.cache.device.num_in_use)
    assert 490 // 16 < used <= 490 // 16 + group.request.num_outputs * 2
    one.cache.check_idle()
