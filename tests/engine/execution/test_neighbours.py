"""An output is the same alone, among others, from cached blocks and recomputed, in every dtype."""

import random

import pytest

from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.stepper import Stepper

OUTPUT_TOKENS = 16
TYPES = [
    {"dtype": "float32", "quantization": "none"},
    {"quantization": "none"},
    {"quantization": "int8"},
    {"quantization": "int4"},
    {"quantization": "int4", "speculation": "ngram"},
]


def start(model, settings, **others):
    """Build an engine."""
    sizes = {"num_blocks": 256, "swap_space": 0.1, "compile": "off", "dtype": "bfloat16"}
    return Stepper(build(EngineSettings(model=str(model), **(sizes | settings | others))))


def output(stepper, group):
    """Return its tokens and log-probabilities, which would show any different rounding."""
    own = [token for token in stepper.sampled if token.group is group]
    return [(token.token_id, token.logprob.logprob) for token in own]


@pytest.mark.parametrize("settings", TYPES, ids=lambda settings: "-".join(settings.values()))
def test_an_output_is_the_same_from_cached_blocks_and_recomputed(tiny_model, settings):
    draw = random.Random(2)
    prompts = [[draw.randrange(3, 500) for _ in range(length)] for length in (40, 700, 1100)]
    stepper = start(tiny_model, settings, max_num_batched_tokens=2048)
    for prompt in prompts:
        outputs = []
        for _ in range(2):
            group = stepper.submit(prompt, OUTPUT_TOKENS, logprobs=1)
            stepper.run()
            outputs.append(output(stepper, group))
        assert outputs[1] == outputs[0]
        first = OUTPUT_TOKENS // 2
        tokens = [token for token, _ in outputs[0][:first]]
        # Scored prompts are computed whole, as after a preemption or a migration.
        group = stepper.submit(
            prompt + tokens, OUTPUT_TOKENS - first, logprobs=1, prompt_logprobs=0
        )
        stepper.run()
        assert output(stepper, group) == outputs[0][first:]


@pytest.mark.parametrize("settings", TYPES, ids=lambda settings: "-".join(settings.values()))
def test_an_output_is_the_same_alone_and_among_others(tiny_model, settings):
    # Also chunks of prompts. A cached prefix would be computed once for both.
    stepper = start(tiny_model, settings, max_num_batched_tokens=40, enable_prefix_caching=False)
    draw = random.Random(1)

    def texts(count):
        return [[draw.randrange(3, 500) for _ in range(draw.randint(1, 60))] for _ in range(count)]

    def submit(number, prompt):
        way = {"temperature": 0.9, "seed": number} if number % 2 else {}
        return stepper.submit(prompt, OUTPUT_TOKENS, logprobs=1, **way)

    prompts, alone = texts(8), []
    for number, prompt in enumerate(prompts):
        group = submit(number, prompt)
        stepper.run()
        alone.append(output(stepper, group))
    groups = []
    for number, (prompt, beside) in enumerate(zip(prompts, texts(8), strict=True)):
        groups.append(submit(number, prompt))
        stepper.submit(beside, draw.randint(1, 30), temperature=1.0, seed=number)
        for _ in range(draw.randint(0, 2)):
            stepper.step()
    stepper.run()
    assert [output(stepper, group) for group in groups] == alone
