"""Steps that are launched before the one before them is done give what others give."""

import itertools

import pytest

from octavo.engine.pipeline import Pipeline
from octavo.engine.running.pending_step import Launched
from octavo.engine.scheduling.request import BeamSearch, FinishReason
from octavo.engine.settings import EngineSettings
from octavo.engine.startup import build
from tests.engine.stepper import Stepper

WAYS = (
    {},
    {"temperature": 0.8, "top_p": 0.9, "seed": 3},
    {"temperature": 1.0, "n": 3, "seed": 5},
    {"logprobs": 2},
    {"temperature": 1.0, "logprobs": 1, "n": 2, "min_tokens": 9},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"prompt_logprobs": 1},
    {"logit_bias": {7: 2.0, 11: 1.5}},
    {"beam": BeamSearch(2)},
)
EOS = range(0, 500, 13)
"""So many that outputs end at any moment."""
SHORT = {"num_blocks": 22, "block_size": 8}


def engine(tiny_model, *, ahead, **settings):
    settings = {"dtype": "float32", "num_blocks": 128, "swap_space": 0.01} | settings
    parts = build(
        EngineSettings(
            model=str(tiny_model), max_num_seqs=12, max_num_batched_tokens=24, **settings
        )
    )
    return Stepper(parts, ahead=ahead)


def outputs(stepper, ways):
    """Every output of three requests for each way, which come one by one."""
    groups = []
    for i, way in enumerate(ways * 3):
        prompt = [3 + i % 2] * 8 + list(range(20 + i, 30 + 2 * i))
        groups.append(stepper.submit(prompt, 1 + 7 * i % 23, **{"eos": EOS} | way))
        stepper.step()
    stepper.run()
    return [
        [
            (s.token_ids[s.num_prompt :], s.finish_reason)
            for s in sorted(group.sequences, key=lambda s: s.index)
        ]
        for group in groups
        if group.beam is None
    ] + [[h.token_ids for h in group.beam.hypotheses] for group in groups if group.beam]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_prefix_caching": False},
        SHORT | {"preemption": "swap"},
        SHORT | {"preemption": "recompute"},
    ],
    ids=["room", "no prefixes", "swap", "recompute"],
)
def test_outputs_are_the_same(tiny_model, settings):
    one_by_one = engine(tiny_model, ahead=False, **settings)
    expected = outputs(one_by_one, WAYS)
    ahead = engine(tiny_model, ahead=True, **settings)
    assert outputs(ahead, WAYS) == expected
    drawn = [
        sum(len(part.samplers) for batch in e.batches for part in batch.slices)
        for e in (one_by_one, ahead)
    ]
    assert drawn[1] > drawn[0], "nothing was drawn in vain"
    ended = {reason for output in expected for _, reason in (o for o in output if len(o) == 2)}
    assert {FinishReason.EOS, FinishReason.LENGTH} <= ended
    if "preemption" in settings:
        counters = ahead.scheduler.counters
        assert counters.preemptions_swap + counters.preemptions_recompute > 0


class Watched:
    """An executor whose steps' beginnings and ends are written down."""

    def __init__(self, executor):
        self.seen = []
        self._executor = executor
        self._numbers = itertools.count()

    def launch(self, batch, *, after=None, launching=None):
        number = next(self._numbers)
        self.seen.append(("launch", number))
        launched = self._executor.launch(batch, after=after and after.own)
        return WatchedStep(launched, lambda: self.seen.append(("result", number)))


class WatchedStep:
    def __init__(self, own: Launched, note):
        self.own = own
        self._note = note

    def result(self):
        self._note()
        return self.own.result()


def watch(stepper, **way):
    watched = Watched(stepper.parts.executor)
    stepper.pipeline = Pipeline(stepper.scheduler, watched, ahead=True)
    stepper.submit(range(3, 10), 6, **way)
    stepper.run()
    return watched.seen


def test_a_step_is_launched_before_the_one_before_it_is_waited_for(tiny_model):
    seen = watch(engine(tiny_model, ahead=True))
    assert len(seen) == 2 * 6  # none was launched after the last token
    for number in range(5):
        assert seen.index(("launch", number + 1)) < seen.index(("result", number))


@pytest.mark.parametrize(
    "way", [{"repetition_penalty": 1.5}, {"beam": BeamSearch(2)}], ids=["penalties", "beams"]
)
def test_what_must_know_the_token_before_waits_for_it(tiny_model, way):
    seen = watch(engine(tiny_model, ahead=True), **way)
    assert seen == [(what, number) for number in range(6) for what in ("launch", "result")]


@pytest.mark.parametrize("ahead", [False, True], ids=["one by one", "ahead"])
def test_a_block_that_the_last_token_fills_is_found_by_the_next_request(tiny_model, ahead):
    stepper = engine(tiny_model, ahead=ahead, block_size=8)
    group = stepper.submit(range(3, 12), 8)  # 9 and 7 tokens are computed
    stepper.run()
    follower = stepper.submit([*group.sequences[0].token_ids, 7], 1)
    stepper.run()
    assert follower.cached_tokens == 16
