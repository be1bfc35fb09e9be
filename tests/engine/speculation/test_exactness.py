"""Drafts change no token, for every draft method and any shortage of memory."""

import random

import pytest
from transformers import MambaConfig

from octavo.engine.scheduling.request import BeamSearch, Resumption
from octavo.engine.settings import EngineSettings
from octavo.engine.speculation.method import Method
from octavo.engine.speculation.methods import make_speculation
from octavo.engine.speculation.speculation import Speculation
from octavo.engine.startup.build import build
from octavo.engine.startup.capacity import StartupError
from tests.engine.conftest import STOPPING
from tests.engine.random_model import save_random_model
from tests.engine.stepper import Stepper

VOCABULARY = 500
LONGEST_PROMPT, LONGEST_OUTPUT = 60, 40
AMPLE, SCARCE = 400, 26


def requests(count):
    """Requests with all kinds of parameters, as arguments of `Stepper.submit`."""
    rng, asked = random.Random(0), []
    for number in range(count):
        length = rng.randint(1, LONGEST_PROMPT)
        phrase = [rng.randrange(10, VOCABULARY) for _ in range(rng.choice([3, 8, 60]))]
        prompt = (phrase * LONGEST_PROMPT)[:length]
        max_tokens = rng.randint(1, LONGEST_OUTPUT)
        sampling = {
            "temperature": rng.choice([0.0, 0.0, 0.3, 1.0]),
            "seed": number,
            "n": rng.choice([1, 1, 1, 2, 3]),
            "logprobs": rng.choice([None, None, 0, 3]),
        }
        if rng.random() < 0.3:
            sampling |= {"top_k": rng.choice([1, 5, 40]), "top_p": 0.9, "min_p": 0.02}
        if rng.random() < 0.3:
            sampling |= {
                "repetition_penalty": 1.2,
                "presence_penalty": rng.choice([-0.5, 0.4]),
                "frequency_penalty": 0.3,
            }
        if rng.random() < 0.2:
            sampling["logit_bias"] = {rng.randrange(VOCABULARY): 4.0 for _ in range(3)}
        if rng.random() < 0.1:
            sampling["prompt_logprobs"] = 1
        more = {
            "eos": rng.choice([(), STOPPING[:1], STOPPING]),
            "stop": rng.choice([(), (), STOPPING[2:4]]),
            "min_tokens": min(max_tokens, rng.choice([0, 0, 5, 20])),
            "priority": rng.choice([0, 0, 1]),
        }
        if number % 25 == 7:
            sampling = {}
            more |= {"beam": BeamSearch(3), "min_tokens": 0}
        elif number % 10 == 3 and max_tokens > 4:
            more["resume"] = {0: Resumption(tuple(phrase[:3]))}
        asked.append((prompt, max_tokens, more | sampling))
    return asked


class Echo(Method):
    """Drafts the tokens of a run without drafts, with random mistakes."""

    def __init__(self, expected):
        self.expected = expected  # outputs by prompt
        self.rng = random.Random(1)

    def draft(self, history, most):
        output = history.output.tolist()
        prompt = tuple(history.tokens[: history.num_prompt].tolist())
        for whole in self.expected[prompt]:
            if whole[: len(output)] == output:
                draft = whole[len(output) :][: self.rng.randint(0, most)]
                if draft and self.rng.random() < 0.5:
                    draft[self.rng.randrange(len(draft))] = self.rng.randrange(VOCABULARY)
                return draft
        return []

    def learn(self, history):
        """It can draft for all sequences."""


@pytest.fixture(scope="module")
def run(decided_model):
    """Run requests, a few new ones in each step; return the engine and each request's outputs."""

    def run(asked, speculation=None, *, async_scheduling=False, **settings):
        settings = {"num_blocks": AMPLE, "max_num_batched_tokens": 96} | settings
        parts = build(
            EngineSettings(
                model=str(decided_model),
                dtype="float32",
                block_size=8,
                max_num_seqs=12,
                swap_space=0.1,
                **settings,
            )
        )
        parts.scheduler.speculation = speculation
        engine = Stepper(parts, async_scheduling=async_scheduling)
        groups = []
        for prompt, max_tokens, more in asked:
            groups.append(engine.submit(prompt, max_tokens, **more))
            engine.step()
        engine.run()
        logprobs = {}
        for sampled in engine.sampled:
            if sampled.logprob is not None:
                logprobs.setdefault(sampled.sequence, []).append(sampled.logprob)
        return engine, [given(group, logprobs) for group in groups]

    return run


def given(group, logprobs):
    if group.beam is not None:
        return [(found.token_ids, pytest.approx(found.score)) for found in group.beam.hypotheses]
    return [
        (
            sequence.token_ids[sequence.num_prompt :],
            sequence.finish_reason,
            [
                (each.token_id, pytest.approx(each.logprob, abs=1e-4), [t for t, _ in each.top])
                for each in logprobs.get(sequence, [])
            ],
        )
        for sequence in group.sequences
    ]


@pytest.fixture(scope="module")
def asked():
    return requests(60)


@pytest.fixture(scope="module")
def expected(run, asked):
    engine, outputs = run(asked)
    assert engine.scheduler.counters["preemptions_swap"] == 0
    return outputs


@pytest.fixture
def echo(asked, expected):
    outputs = {}
    for (prompt, _, more), got in zip(asked, expected, strict=True):
        if "beam" not in more:
            outputs.setdefault(tuple(prompt), []).extend(tokens for tokens, *_ in got)
    return Speculation(Echo(outputs), 6)


@pytest.mark.parametrize(
    ("preemption", "async_scheduling"),
    [
        *((None, True), ("swap", True), ("recompute", False)),
        pytest.param("swap", False, marks=pytest.mark.slow),
        pytest.param("recompute", True, marks=pytest.mark.slow),
    ],
)
def test_drafts_that_are_sometimes_wrong(run, asked, expected, echo, preemption, async_scheduling):
    memory = {} if preemption is None else {"num_blocks": SCARCE, "preemption": preemption}
    engine, outputs = run(asked, echo, async_scheduling=async_scheduling, **memory)
    assert outputs == expected
    counters = engine.scheduler.counters
    assert 0.3 < counters["accepted_tokens"] / counters["drafted_tokens"] < 0.9
    assert (counters["preemptions_swap"] > 10) is (preemption == "swap")
    assert (counters["preemptions_recompute"] > 10) is (preemption == "recompute")


@pytest.mark.parametrize("name", ["ngram", "suffix", "auto"])
def test_every_method(run, asked, expected, name):
    engine, outputs = run(asked, make_speculation(name, 6), preemption="recompute", num_blocks=32)
    assert outputs == expected
    counters = engine.scheduler.counters
    assert counters["accepted_tokens"] > 50
    assert counters["preemptions_recompute"] > 5


def test_a_model_with_states_is_not_drafted_for(tmp_path):
    config = MambaConfig(
        vocab_size=100, hidden_size=32, state_size=8, num_hidden_layers=2, eos_token_id=2
    )
    save_random_model(config, tmp_path, 0.1)
    settings = {"model": str(tmp_path), "dtype": "float32", "num_blocks": 64}
    with pytest.raises(StartupError, match=r"keep states .* which cannot be rolled back"):
        build(EngineSettings(speculation="ngram", **settings))
    assert build(EngineSettings(speculation="auto", **settings)).scheduler.speculation is None
