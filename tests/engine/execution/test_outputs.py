"""What an engine reports: log-probabilities, seeds, several outputs, stops, prefixes."""

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.stepper import Stepper


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(3, 500, (152,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture
def stepper(decided_model):
    """Return a function that makes an engine in float32 with more settings."""

    def make(**settings):
        settings = {"dtype": "float32", "swap_space": 0.01} | settings
        return Stepper(build(EngineSettings(model=str(decided_model), **settings)))

    return make


@pytest.fixture(scope="module")
def reference(decided_model):
    return AutoModelForCausalLM.from_pretrained(decided_model, dtype=torch.float32)


def own_tokens(group, index=0):
    return group.sequences[index].token_ids[len(group.request.prompt) :]


@pytest.fixture
def true_logprobs(reference):
    """Return the log-probabilities of all tokens but the first, given those before."""

    def score(tokens):
        with torch.inference_mode():
            logits = reference(torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits, -1)

    return score


def assert_agrees(reported, truth, tokens):
    for position, logprob in enumerate(reported):
        token = tokens[position + 1]
        assert logprob.token_id == token
        assert logprob.logprob == pytest.approx(truth[position, token].item(), abs=1e-3)
        values = truth[position].topk(len(logprob.top)).values.tolist()
        assert [value for _, value in logprob.top] == pytest.approx(values, abs=1e-3)


def test_logprobs_agree_with_transformers(stepper, prompt, true_logprobs):
    engine = stepper(num_blocks=64)
    group = engine.submit(prompt, 12, temperature=1.0, seed=5, logprobs=3)
    engine.run()
    tokens = group.sequences[0].token_ids
    truth = true_logprobs(tokens)[len(prompt) - 1 :]
    assert_agrees([token.logprob for token in engine.sampled], truth, tokens[len(prompt) - 1 :])


@pytest.mark.parametrize("batched", [512, 32])
def test_prompt_logprobs_agree_with_transformers(stepper, prompt, true_logprobs, batched):
    engine = stepper(num_blocks=64, max_num_batched_tokens=batched, max_num_seqs=8)
    engine.submit(prompt, 1)
    engine.run()  # leaves the prompt in the prefix cache; it must not be used
    group = engine.submit(prompt, 2, prompt_logprobs=2)
    engine.run()
    assert len(group.prompt_logprobs) == len(prompt) - 1
    assert_agrees(group.prompt_logprobs, true_logprobs(prompt), prompt)


def test_prompt_logprobs_survive_preemption(stepper, prompt, true_logprobs):
    engine = stepper(
        num_blocks=16, preemption="recompute", max_num_batched_tokens=32, max_num_seqs=8
    )
    engine.submit(prompt[:80], 40)
    group = engine.submit(prompt[:128], 2, prompt_logprobs=0)
    while not group.prompt_logprobs:
        engine.step()
    engine.scheduler._preempt(group)
    engine.run()
    assert len(group.prompt_logprobs) == 127
    assert_agrees(group.prompt_logprobs, true_logprobs(prompt[:128]), prompt)


def test_outputs_of_one_request_share_the_prompt_and_differ(stepper, prompt):
    engine = stepper(num_blocks=64, enable_prefix_caching=False)
    group = engine.submit(prompt[:100], 20, temperature=2.0, seed=7, n=4)
    used = 0
    while not engine.scheduler.idle:
        engine.step()
        used = max(used, engine.cache.device.num_in_use)
    outputs = [tuple(own_tokens(group, i)) for i in range(4)]
    assert len(set(outputs)) == 4
    assert used == 100 // 16 + 4 * 2  # 6 full blocks shared; each output's own 24 tokens
    engine.cache.check_idle()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_several_outputs_survive_preemption(stepper, prompt, mode):
    calm = stepper(num_blocks=256)
    tight = stepper(num_blocks=26, preemption=mode, enable_prefix_caching=False)
    groups = []
    for engine in (calm, tight):
        groups.append(
            [engine.submit(prompt[i : i + 40], 40, temperature=1.0, seed=i, n=3) for i in range(3)]
        )
        engine.run()
    counters = tight.scheduler.counters
    assert counters["preemptions_swap"] + counters["preemptions_recompute"] > 0
    for undisturbed, preempted in zip(*groups, strict=True):
        for index in range(3):
            assert own_tokens(preempted, index) == own_tokens(undisturbed, index)


def test_the_second_request_with_a_long_prefix_computes_only_the_rest(stepper, prompt):
    prefix = [*itertools.islice(itertools.cycle([*prompt, 7]), 1000)]
    tails = prompt[3:40], prompt[50:75]
    plain = stepper(num_blocks=160, enable_prefix_caching=False)
    caching = stepper(num_blocks=160)
    outputs = []
    for engine in (plain, caching):
        groups = []
        for tail in tails:
            groups.append(engine.submit([*prefix, *tail], 8))
            first = engine.step()
            engine.run()
        outputs.append([own_tokens(group) for group in groups])
    assert outputs[0] == outputs[1]
    shared = 1000 // 16 * 16  # partial blocks are not shared
    assert groups[1].cached_tokens == shared
    assert first.num_tokens == 1000 - shared + len(tails[1])
    assert sum(batch.num_tokens for batch in caching.batches[-8:]) == first.num_tokens + 7


def test_a_prefix_that_was_evicted_comes_back_from_swap_space(stepper, prompt):
    engine = stepper(num_blocks=16)
    first = engine.submit(prompt[:100], 10)
    engine.run()
    engine.submit(prompt[:100], 10)  # a hit: only hit blocks are offloaded to swap space
    engine.run()
    engine.submit(prompt[::-1][:120], 10)
    engine.run()
    engine.submit(prompt[1:130], 10)
    engine.run()
    second = engine.submit(prompt[:100], 10)
    batch = engine.step()
    assert batch.transfers.swap_in
    assert batch.num_tokens == 4
    engine.run()
    assert own_tokens(second) == own_tokens(first)


def test_stop_and_eos_tokens_end_an_output(stepper, prompt):
    engine = stepper(num_blocks=64)
    free = engine.submit(prompt[:30], 10)
    engine.run()
    third = own_tokens(free)[2]
    stopped = engine.submit(prompt[:30], 10, stop=[third])
    ended = engine.submit(prompt[:30], 10, eos=[third])
    held = engine.submit(prompt[:30], 10, eos=[third], min_tokens=10)
    engine.run()
    assert [group.sequences[0].finish_reason.name for group in (free, stopped, ended, held)] == [
        "LENGTH",
        "STOP_TOKEN",
        "EOS",
        "LENGTH",
    ]
    assert own_tokens(stopped) == own_tokens(ended) == own_tokens(free)[:3]
    assert third not in own_tokens(held)
