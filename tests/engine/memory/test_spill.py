"""A sequence longer than the KV cache: the same bits as with enough memory, beside others."""

import os
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig

from octavo.common.kv_cache.layer_groups import BlockBudget
from octavo.engine.events import FailureCode
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from octavo.engine.startup.capacity import StartupError
from tests.engine.random_model import TINY, save_random_model
from tests.engine.stepper import Stepper

CONTEXT, BLOCKS, STEP_TOKENS, OUTPUT_TOKENS = 4096, 100, 128, 12
LENGTH = 3000
"""Tokens of a long prompt: almost twice those of `BLOCKS` blocks."""


@pytest.fixture(scope="module")
def long_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("long")
    config = LlamaConfig(**TINY | {"max_position_embeddings": CONTEXT, "head_dim": 32})
    save_random_model(config, path, std=0.12, dtype=torch.float32)
    return path


@pytest.fixture
def start(long_model, tmp_path):
    """Returns an engine, small with a file unless said otherwise."""

    def make(**settings):
        sizes = {"num_blocks": BLOCKS, "kv_spill": tmp_path, "kv_spill_space": 0.02}
        sizes |= {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 8, "swap_space": 0.1}
        settings = {"dtype": "float32"} | sizes | settings
        return Stepper(build(EngineSettings(model=str(long_model), **settings)))

    return make


def prompt(number, length=LENGTH):
    draw = random.Random(number)
    return [draw.randrange(3, 500) for _ in range(length)]


def output(engine, group):
    """Return its tokens and log-probabilities, which would show any different rounding."""
    own = [token for token in engine.sampled if token.group is group]
    return [(token.token_id, token.logprob.logprob) for token in own]


def alone(engine, tokens):
    """Return the output of a prompt that nothing runs beside."""
    group = engine.submit(tokens, OUTPUT_TOKENS, logprobs=1)
    engine.run()
    assert len(output(engine, group)) == OUTPUT_TOKENS
    return output(engine, group)


@pytest.fixture
def expected(start):
    """The output of a long prompt in an engine with enough memory, in float32."""
    return alone(start(num_blocks=CONTEXT // 16, kv_spill=None), prompt(0))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "types",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "int8", "compile": "off"},
        {"block_size": 64, "num_blocks": BLOCKS // 4, "speculation": "ngram"},
    ],
    ids=lambda types: "-".join(map(str, types.values())) or "float32",
)
def test_a_sequence_longer_than_the_cache_has_the_same_bits(start, types):
    enough = start(**types | {"num_blocks": CONTEXT // 16, "kv_spill": None})
    engine = start(**types)
    assert engine.parts.limits.max_model_len == CONTEXT
    outputs = [alone(each, prompt(0)) for each in (enough, engine)]
    assert outputs[1] == outputs[0]
    assert max(batch.spilled[1].num_units for batch in engine.batches if batch.spilled) >= 3
    assert engine.cache.moves.counters["spilled_blocks"] > BLOCKS // 4
    prefix = alone(engine, prompt(0))  # its first blocks are cached
    assert prefix == outputs[0]


def test_the_outputs_are_those_of_transformers(start, long_model):
    engine = start()
    group = engine.submit(prompt(0), OUTPUT_TOKENS, logprobs=1)
    engine.run()
    reference = AutoModelForCausalLM.from_pretrained(long_model, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([group.sequences[0].token_ids])).logits[0, LENGTH - 1 : -1]
    truth = torch.log_softmax(logits, -1)
    reported = output(engine, group)
    assert [token for token, _ in reported] == logits.argmax(-1).tolist()
    assert [logprob for _, logprob in reported] == pytest.approx(
        truth.max(-1).values.tolist(), abs=1e-4
    )


def test_others_run_beside_it(start, expected):
    engine = start()
    shorts = [alone(engine, prompt(number, 60)) for number in range(1, 5)]
    group = engine.submit(prompt(0), 4 * OUTPUT_TOKENS, logprobs=1)
    second = engine.submit(prompt(9), OUTPUT_TOKENS, logprobs=1)
    beside = [
        engine.submit(prompt(number, 60), OUTPUT_TOKENS, logprobs=1) for number in range(1, 5)
    ]
    while any(each in engine.scheduler.groups() for each in beside):
        engine.step()
    assert group in engine.scheduler.running
    assert second in engine.scheduler.waiting, "there is one file"
    engine.run()
    assert [output(engine, each) for each in beside] == shorts
    assert output(engine, group)[:OUTPUT_TOKENS] == expected
    assert len(output(engine, second)) == OUTPUT_TOKENS


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_it_is_preempted(start, expected, preemption):
    engine = start(preemption=preemption)
    group = engine.submit(prompt(0), OUTPUT_TOKENS, logprobs=1)
    for done in (LENGTH // 2, LENGTH):
        while group.sequences[0].num_computed < done:
            engine.step()
        assert engine.cache.spilled.id is not None
        engine.scheduler._preempt(group)
        assert (engine.cache.spilled.id is None) is (preemption == "recompute")
    engine.run()
    assert engine.scheduler.counters[f"preemptions_{preemption}"] == 2
    assert output(engine, group) == expected


def test_an_aborted_one_leaves_the_file_to_the_next(start, expected):
    engine = start()
    group = engine.submit(prompt(5), OUTPUT_TOKENS)
    while engine.cache.spilled.id is None:
        engine.step()
    engine.step()
    engine.core.requests.abort(0, group.request.request_id, None)
    engine.cache.take_transfers()
    engine.cache.check_idle()
    assert alone(engine, prompt(0)) == expected


def test_a_file_that_fails_ends_its_request_alone(start):
    engine = start()
    short = alone(engine, prompt(1, 60))
    group = engine.submit(prompt(0), OUTPUT_TOKENS)
    while engine.cache.spilled.id is None:
        engine.step()
    beside = engine.submit(prompt(1, 60), OUTPUT_TOKENS, logprobs=1)
    failures = []
    engine.core._publish_events = lambda outputs, _changes, _load: failures.extend(
        failure for step in outputs.values() for failure in step.failures
    )
    os.ftruncate(engine.parts.executor.cache.spill.fileno(), 0)
    engine.run()
    assert [(each.request_id, each.code) for each in failures] == [
        (group.request.request_id, FailureCode.INTERNAL)
    ]
    assert output(engine, beside) == short
    assert len(alone(engine, prompt(0))) == OUTPUT_TOKENS


def test_the_file_has_no_name_and_is_its_owners_alone(start, tmp_path):
    engine = start()
    status = os.fstat(engine.parts.executor.cache.spill.fileno())
    assert not list(tmp_path.iterdir())
    assert status.st_mode & 0o077 == 0
    assert status.st_blocks * 512 >= status.st_size > 0, "its space is reserved"


def test_several_outputs_must_fit_in_blocks(start):
    (budget,) = start().parts.limits.budgets
    assert budget.fitting_output(LENGTH, 1, CONTEXT - LENGTH) == CONTEXT - LENGTH
    assert budget.fitting_output(LENGTH, 2, CONTEXT - LENGTH) < 1
    assert BlockBudget.needed(budget, 300, 100, 2) == 300 // 16 + 2 * 7


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"num_blocks": 40}, r"needs \d+ KV-cache blocks at least, and there are 40"),
        ({"kv_spill_space": 0.001}, "--kv-spill-space of 0.001 GiB holds .* raise it"),
        ({"kv_spill_space": 1e7}, "No space left|File too large"),
        ({"kv_spill": "/none"}, "/none: No such file"),
        ({"max_model_len": CONTEXT + 1}, "the model's context is 4096"),
    ],
)
def test_it_is_refused_by_name(start, settings, why):
    with pytest.raises(StartupError, match=why):
        start(**settings)


def test_windows_are_refused_by_name(tmp_path):
    config = MistralConfig(**TINY, sliding_window=64)
    save_random_model(config, tmp_path, std=0.1)
    settings = EngineSettings(model=str(tmp_path), kv_spill=tmp_path, num_blocks=BLOCKS)
    with pytest.raises(StartupError, match="windows"):
        build(settings)
