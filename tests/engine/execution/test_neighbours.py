"""An output is the same alone and among others, in every dtype of Octavo's own products."""

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


@pytest.mark.parametrize("settings", TYPES, ids=lambda settings: "-".join(settings.values()))
def test_an_output_is_the_same_alone_and_among_others(tiny_model, settings):
    stepper = Stepper(
        build(
            EngineSettings(
                model=str(tiny_model),
                compile="off",
                num_blocks=256,
                swap_space=0.1,
                max_num_batched_tokens=40,  # also chunks of prompts
                enable_prefix_caching=False,  # it would compute a prompt once for both
                **({"dtype": "bfloat16"} | settings),
            )
        )
    )
    draw = random.Random(1)

    def texts(count):
        return [[draw.randrange(3, 500) for _ in range(draw.randint(1, 60))] for _ in range(count)]

    def submit(number, prompt):
        way = {"temperature": 0.9, "seed": number} if number % 2 else {}
        return stepper.submit(prompt, OUTPUT_TOKENS, logprobs=1, **way)

    def output(group):
        """Return its tokens and log-probabilities, which would show any different rounding."""
        own = [token for token in stepper.sampled if token.group is group]
        return [(token.token_id, token.logprob.logprob) for token in own]

    prompts, alone = texts(8), []
    for number, prompt in enumerate(prompts):
        group = submit(number, prompt)
        stepper.run()
        alone.append(output(group))
    groups = []
    for number, (prompt, beside) in enumerate(zip(prompts, texts(8), strict=True)):
        groups.append(submit(number, prompt))
        stepper.submit(beside, draw.randint(1, 30), temperature=1.0, seed=number)
        for _ in range(draw.randint(0, 2)):
            stepper.step()
    stepper.run()
    assert list(map(output, groups)) == alone
