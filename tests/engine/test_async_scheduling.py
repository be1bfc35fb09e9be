"""With async scheduling, outputs are the same as without."""

import pytest

from octavo.engine.execution.pending_step import PendingStep
from octavo.engine.scheduling.request import BeamSearch, FinishReason
from octavo.engine.settings import EngineSettings
from octavo.engine.startup.build import build
from tests.engine.stepper import Stepper, parts_of

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
"""End tokens: so many that outputs end at any time."""
SHORT = {"num_blocks": 22, "block_size": 8}


def engine(tiny_model, *, async_scheduling, **settings):
    settings = {"dtype": "float32", "num_blocks": 128, "swap_space": 0.01} | settings
    parts = build(
        EngineSettings(
            model=str(tiny_model), max_num_seqs=12, max_num_batched_tokens=24, **settings
        )
    )
    return Stepper(parts, async_scheduling=async_scheduling)


def outputs(stepper, ways):
    """Return all outputs of three requests of each kind, submitted one by one."""
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
    one_by_one = engine(tiny_model, async_scheduling=False, **settings)
    expected = outputs(one_by_one, WAYS)
    overlapped = engine(tiny_model, async_scheduling=True, **settings)
    assert outputs(overlapped, WAYS) == expected
    sampled = [
        sum(len(scheduled.sampled) for batch in e.batches for scheduled in parts_of(batch))
        for e in (one_by_one, overlapped)
    ]
    assert sampled[1] > sampled[0], "no token was dropped"
    ended = {reason for output in expected for _, reason in (o for o in output if len(o) == 2)}
    assert {FinishReason.EOS, FinishReason.LENGTH} <= ended
    if "preemption" in settings:
        counters = overlapped.scheduler.counters
        assert counters["preemptions_swap"] + counters["preemptions_recompute"] > 0


def watch(stepper, monkeypatch, **way):
    """Run a request of 6 tokens; return the launches and collections of its steps, in order."""
    seen = record(stepper, monkeypatch)
    stepper.submit(range(3, 10), 6, **way)
    stepper.run()
    return seen


def record(stepper, monkeypatch):
    """Return a list that collects launches and collections of steps, by number, in order."""
    seen, numbers = [], {}
    launch, collect = stepper.parts.executor.launch, PendingStep.collect

    def watched_launch(batch, inputs, *others):
        numbers[id(batch)] = len(numbers)
        seen.append(("launch", numbers[id(batch)]))
        return launch(batch, inputs, *others)

    def watched_collect(pending):
        seen.append(("collect", numbers[id(pending.batch)]))
        return collect(pending)

    monkeypatch.setattr(stepper.parts.executor, "launch", watched_launch)
    monkeypatch.setattr(PendingStep, "collect", watched_collect)
    return seen


@pytest.mark.parametrize("way", [{}, {"repetition_penalty": 1.5}], ids=["plain", "penalties"])
def test_a_step_is_launched_before_the_one_before_it_is_collected(tiny_model, monkeypatch, way):
    seen = watch(engine(tiny_model, async_scheduling=True), monkeypatch, **way)
    assert len(seen) == 2 * 6  # none was launched after the last token
    for number in range(5):
        assert seen.index(("launch", number + 1)) < seen.index(("collect", number))


def test_a_step_with_beams_waits_for_their_last_tokens(tiny_model, monkeypatch):
    seen = watch(engine(tiny_model, async_scheduling=True), monkeypatch, beam=BeamSearch(2))
    assert seen == [(what, number) for number in range(6) for what in ("launch", "collect")]


def test_events_are_published_between_prepare_and_launch(tiny_model, monkeypatch):
    stepper = engine(tiny_model, async_scheduling=False)
    seen, executor = [], stepper.parts.executor
    prepare, launch = executor.prepare, executor.launch

    def watched_prepare(*args):
        seen.append("prepare")
        return prepare(*args)

    def watched_launch(*args):
        seen.append("launch")
        return launch(*args)

    monkeypatch.setattr(executor, "prepare", watched_prepare)
    monkeypatch.setattr(executor, "launch", watched_launch)
    monkeypatch.setattr(
        stepper.core, "_publish_events", lambda outputs, *_: seen.append(len(outputs))
    )
    stepper.submit(range(3, 10), 2)
    stepper.run()
    assert seen == ["prepare", 1, "launch", "prepare", 1, "launch"]  # Started, then a token


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_block_that_the_last_token_fills_is_found_by_the_next_request(
    tiny_model, async_scheduling
):
    stepper = engine(tiny_model, async_scheduling=async_scheduling, block_size=8)
    group = stepper.submit(range(3, 12), 8)  # 9 and 7 tokens are computed
    stepper.run()
    follower = stepper.submit([*group.sequences[0].token_ids, 7], 1)
    stepper.run()
    assert follower.cached_tokens == 16
