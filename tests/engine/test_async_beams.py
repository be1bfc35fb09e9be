"""With async scheduling, beam searches and scored prompts do not delay other requests."""

import pytest
from transformers import Lfm2Config, MistralConfig

from octavo.engine.core import StepError
from octavo.engine.execution.pending_step import PendingStep
from octavo.engine.scheduling.request import BeamSearch
from octavo.engine.scheduling.sequence import GroupState
from tests.engine.random_model import save_random_model
from tests.engine.test_async_scheduling import EOS, engine, record

OUTPUT = 12
WAYS = (
    {"beam": BeamSearch(2)},
    {},
    {"prompt_logprobs": 1},
    {"beam": BeamSearch(3, 0.6), "eos": EOS},
    {"temperature": 0.9, "seed": 3, "eos": EOS},
    {"temperature": 1.0, "n": 2, "seed": 5, "prompt_logprobs": 0},
    {"beam": BeamSearch(2, 1.0, early_stopping=True), "eos": EOS},
    {"temperature": 0.9, "repetition_penalty": 1.3},
)
NUM_REQUESTS = 2 * len(WAYS)
ABORTED = {3, 10}
"""Indices of two requests: a beam search, and a scored prompt."""


def launched(stepper):
    """Return the groups of the step that is not collected yet."""
    pending = stepper.core.steps.pending
    return {} if pending is None else dict.fromkeys(pending.batch.groups)


def preempt_while_steps_run(stepper):
    """Preempt a search or a scored prompt while its step runs, in every third step.

    Returns:
        A list that collects the groups.
    """
    scheduler, victims = stepper.scheduler, []
    schedule_running = scheduler._schedule_running

    def schedule(batch):
        found = [
            group
            for group in launched(stepper)
            if group.state is GroupState.RUNNING and (group.beam is not None or group.awaits_output)
        ]
        if not found or len(stepper.batches) % 3:
            return schedule_running(batch)
        victims.append(found[-1])
        scheduler._preempt(found[-1])
        schedule_running(batch)
        return True

    scheduler._schedule_running = schedule
    return victims


def run(stepper, aborted=()):
    """Run requests of all kinds, submitted one by one; abort some while their steps run."""
    groups, left = [], set(aborted)
    while stepper.core.working or len(groups) < NUM_REQUESTS:
        if (number := len(groups)) < NUM_REQUESTS:
            prompt = [3 + number % 2] * 8 + list(range(20 + number, 40 + 2 * number))
            way = WAYS[number % len(WAYS)]
            groups.append(stepper.submit(prompt, OUTPUT, **way))
        stepper.step()
        for number in [n for n in left if n < len(groups) and groups[n] in launched(stepper)]:
            left.remove(number)
            stepper.core.requests.abort(0, groups[number].request.request_id, None)
    assert not left
    stepper.cache.check_idle()
    return groups


def outcome(group):
    """Return all tokens and log-probabilities that a request receives."""
    scored = group.prompt_logprobs
    tokens = [s.token_ids for s in sorted(group.sequences, key=lambda s: s.index)]
    values = [each.logprob for each in scored]
    if group.beam is not None:
        tokens = [hypothesis.token_ids for hypothesis in group.beam.hypotheses]
        values = [hypothesis.score for hypothesis in group.beam.hypotheses]
    return [tokens, [each.token_id for each in scored]], values


@pytest.fixture(scope="module")
def expected(tiny_model):
    return list(map(outcome, run(engine(tiny_model, async_scheduling=False))))


def assert_same(groups, expected, *, but=()):
    """Check that all requests but some got the expected outputs."""
    for number, (group, (tokens, values)) in enumerate(zip(groups, expected, strict=True)):
        if number not in but:
            found = outcome(group)
            assert found[0] == tokens
            assert found[1] == pytest.approx(values, abs=1e-4)


@pytest.mark.few(3)
@pytest.mark.parametrize("aborted", [(), ABORTED], ids=["all", "some aborted"])
@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
def test_outputs_are_the_same(tiny_model, expected, preemption, aborted):
    stepper = engine(tiny_model, async_scheduling=True, preemption=preemption or "auto")
    victims = [] if preemption is None else preempt_while_steps_run(stepper)
    assert_same(run(stepper, aborted), expected, but=aborted)
    counters = stepper.scheduler.counters
    if preemption is not None:
        assert sum(group.beam is not None for group in victims) > 3
        assert sum(group.beam is None for group in victims) > 3
        assert (counters["preemptions_swap"] > 0) is (preemption == "swap")


SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
CONFIGS = {
    "states": Lfm2Config(layer_types=["conv", "full_attention"], **SIZES),
    "windows": MistralConfig(sliding_window=16, **SIZES),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_so_they_are_with_states_and_windows(tmp_path, family):
    """Beams also share states and released blocks, in swap space as on the device."""
    save_random_model(CONFIGS[family], tmp_path, 0.12)
    expected = list(map(outcome, run(engine(tmp_path, async_scheduling=False))))
    for preemption in ("swap", "recompute"):
        stepper = engine(tmp_path, async_scheduling=True, preemption=preemption)
        victims = preempt_while_steps_run(stepper)
        assert_same(run(stepper), expected)
        assert sum(group.beam is not None for group in victims) > 3


def test_after_a_step_that_failed_nothing_is_left_half_scored(tiny_model, expected, monkeypatch):
    """A search whose blocks were dropped continues; a prompt whose scores are lost fails."""
    stepper = engine(tiny_model, async_scheduling=True, preemption="recompute")
    scheduler = stepper.scheduler
    plain = [stepper.submit(range(3, 8), OUTPUT) for _ in range(2)]
    search = stepper.submit([3] * 8 + list(range(20, 40)), OUTPUT, beam=BeamSearch(2))
    while not search.live[0].num_output or search not in launched(stepper):
        stepper.step()
    scored = stepper.submit(range(3, 63), 2, prompt_logprobs=0)
    stepper.step()  # without the search
    stepper.step()
    assert {search, scored} <= launched(stepper).keys()
    assert 0 < len(scored.prompt_logprobs) < scored.num_scored < 59
    schedule_running = scheduler._schedule_running

    def preempt_both(batch):
        for group in (search, scored):
            scheduler._preempt(group)
        schedule_running(batch)
        return True

    def fail(_):
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(scheduler, "_schedule_running", preempt_both)
        patch.setattr(PendingStep, "collect", fail)
        with pytest.raises(StepError) as raised:
            stepper.core.step()
    # A new error has no traceback; printing one with all locals would take seconds.
    stepper.core.steps.fail(StepError(raised.value.batch))
    assert all(group.state is GroupState.FINISHED for group in (*plain, scored))
    stepper.run()
    assert outcome(search)[0] == expected[0][0]


def end(stepper, group, how):
    """End a request as its client or its deadline would."""
    if how == "abort":
        stepper.core.requests.abort(0, group.request.request_id, None)
    else:
        stepper.core.requests.expire()


@pytest.mark.parametrize("how", ["abort", "deadline"])
def test_a_search_that_ends_while_its_step_runs_is_dropped(tiny_model, how):
    stepper = engine(tiny_model, async_scheduling=True)
    deadline = 1e-9 if how == "deadline" else None
    group = stepper.submit(range(3, 10), 6, beam=BeamSearch(2), deadline=deadline)
    for _ in range(3):
        stepper.step()
    assert group in launched(stepper)
    end(stepper, group, how)
    stepper.run()
    assert group.state is GroupState.FINISHED
    assert group.beam.hypotheses == []
    assert stepper.core.idle


def steps_of(stepper, group):
    """Return the numbers of the steps that compute a group's tokens."""
    return [number for number, batch in enumerate(stepper.batches) if group in batch.groups]


def assert_overlapped(seen, numbers):
    """Check that each of these steps was launched before the previous one was collected."""
    for number in numbers:
        assert seen.index(("launch", number)) < seen.index(("collect", number - 1))


def test_nobody_waits_for_the_beams_of_another_request(tiny_model, monkeypatch):
    stepper = engine(tiny_model, async_scheduling=True)
    seen = record(stepper, monkeypatch)
    plain = [stepper.submit(range(3 + i, 8 + i), 20) for i in range(3)]
    search = stepper.submit(range(30, 38), 8, beam=BeamSearch(2))
    stepper.run()
    for group in plain:
        assert steps_of(stepper, group) == list(range(20))
    assert_overlapped(seen, range(1, 20))
    assert steps_of(stepper, search) == list(range(0, 16, 2))


def test_a_step_that_is_mostly_beams_is_waited_for(tiny_model, monkeypatch):
    stepper = engine(tiny_model, async_scheduling=True)
    seen = record(stepper, monkeypatch)
    plain = stepper.submit(range(3, 8), 8)
    search = stepper.submit(range(30, 38), 8, beam=BeamSearch(4))
    stepper.run()
    # The first step has one sequence of each, so the second runs without the search.
    assert steps_of(stepper, search) == [0, *range(2, 9)]
    assert steps_of(stepper, plain) == list(range(8))
    assert_overlapped(seen, [1, 2])
    for number in range(3, 9):
        assert seen.index(("collect", number - 1)) < seen.index(("launch", number))


def test_a_prompt_is_scored_in_steps_that_overlap(tiny_model, monkeypatch):
    stepper = engine(tiny_model, async_scheduling=True)
    seen = record(stepper, monkeypatch)
    group = stepper.submit(range(3, 63), 4, prompt_logprobs=0)
    stepper.run()
    assert_overlapped(seen, range(1, 6))  # for 24, 24 and 12 prompt tokens, and 3 decodes
    assert [each.token_id for each in group.prompt_logprobs] == list(range(4, 63))
