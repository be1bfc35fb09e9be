"""Finished outputs satisfy their constraints, for any sampling and any lack of memory."""

import itertools
import json
import random
import re
import threading
import time

import pytest

from octavo.engine.constraints import mask_threads
from octavo.engine.constraints.mask_threads import GRACE_SECONDS
from octavo.engine.constraints.matcher import Matcher
from octavo.engine.events import FailureCode
from octavo.engine.scheduling.request import BeamSearch, Resumption
from tests.engine.constraints.runner import Runner, decode, encode
from tests.engine.constraints.schemas import check, random_schema

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PERSON_TEXT = json.dumps(PERSON)


def force(runner, schemas, **options) -> int:
    """Run every schema with several outputs and with beams; return how many outputs finished."""
    ways = ({"n": 4, "seed": 1, "max_tokens": 200}, {"beam": BeamSearch(4), "max_tokens": 80})
    asked = [
        (schema, runner.submit("json_schema", json.dumps(schema), **(options | way)))
        for schema in schemas
        for way in ways
    ]
    finished = 0
    for schema, request_id in asked:
        ended = runner.wait(request_id)
        assert ended.failure is None, (schema, ended.failure)
        for index, reason in ended.reasons.items():
            assert reason in {"EOS", "LENGTH"}
            if reason == "EOS":
                check(decode(ended.tokens[index]), schema)
                finished += 1
    runner.settle()
    return finished


@pytest.mark.parametrize(("dtype", "preemption"), [("float32", "swap"), ("bfloat16", "recompute")])
def test_every_finished_output_keeps_to_its_schema(crowded, dtype, preemption):
    runner = crowded(dtype=dtype, preemption=preemption)
    draw = random.Random(preemption)
    finished = force(runner, [random_schema(draw) for _ in range(12)])
    assert finished > 12 * 8 * 0.3
    counters = runner.parts.scheduler.counters
    assert counters[f"preemptions_{preemption}"] > 0


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_kinds(engine, temperature):
    def text(kind, *texts):
        ended = engine.run(kind, *texts, temperature=temperature, seed=1)
        return decode(ended.tokens[0])

    assert re.fullmatch(r"[0-9]{3}-[a-z]{2,5}", text("regex", "[0-9]{3}-[a-z]{2,5}"))
    assert re.fullmatch("a(x|yy){2,4}", text("grammar", 'start: "a" b{2,4}\nb: "x" | "yy"'))
    choices = ("yes", "no", "maybe. (a/b) ü\n", "ye")
    assert text("choices", *choices) in choices
    ended = engine.run("json_object", temperature=temperature, max_tokens=500)
    if ended.reasons[0] == "EOS":
        assert isinstance(json.loads(decode(ended.tokens[0])), dict)


def test_the_end_is_forced_where_nothing_else_can_follow(engine):
    for ignore_eos in (False, True):
        ended = engine.run("regex", "abc", ignore_eos=ignore_eos, min_tokens=0 if ignore_eos else 9)
        assert (decode(ended.tokens[0]), ended.reasons) == ("abc", {0: "EOS"})


def test_ignored_ends_come_only_where_nothing_else_can_follow(engine):
    ended = engine.run("regex", "a{1,9}", ignore_eos=True)
    assert (decode(ended.tokens[0]), ended.reasons) == ("a" * 9, {0: "EOS"})


def test_an_output_has_its_least_tokens_if_the_grammar_has_them(engine):
    for seed in range(5):
        ended = engine.run("regex", "[ab]{1,40}", min_tokens=20, seed=seed)
        assert len(ended.tokens[0]) > 20
        assert ended.reasons == {0: "EOS"}


def test_length_and_stop_tokens_cut(engine):
    ended = engine.run("regex", "[ab]{50}", max_tokens=10)
    assert (len(ended.tokens[0]), ended.reasons) == (10, {0: "LENGTH"})
    ended = engine.run("regex", "ab{50}", stop_token_ids=frozenset(encode("b")))
    assert (decode(ended.tokens[0]), ended.reasons) == ("ab", {0: "STOP_TOKEN"})


def test_bias_and_penalties_change_no_more_than_the_choice(engine):
    bias = {encode("z")[0]: 100.0, encode("b")[0]: 50.0}
    ended = engine.run("regex", "[ab]{6}", temperature=0.0, logit_bias=bias)
    assert decode(ended.tokens[0]) == "bbbbbb"
    ended = engine.run("regex", "[ab]{6}", repetition_penalty=50.0, frequency_penalty=2.0)
    assert re.fullmatch("[ab]{6}", decode(ended.tokens[0]))


def test_logprobs_are_the_model_s_own(engine):
    free = engine.run(None, max_tokens=1, logprobs=20, temperature=0.0)
    forced = engine.run("regex", "q", logprobs=20)
    assert forced.logprobs[0][0] < free.logprobs[0][0] < 0


def test_the_same_seed_gives_the_same_output_beside_others(engine):
    alone = engine.run("json_schema", PERSON_TEXT, seed=7, n=3)
    others = [engine.submit("json_schema", PERSON_TEXT, seed=i, n=2) for i in range(6)]
    again = engine.run("json_schema", PERSON_TEXT, seed=7, n=3)
    for other in others:
        engine.wait(other)
    assert again.tokens == alone.tokens


@pytest.mark.parametrize("have", [0, 1, 9])
def test_an_output_that_another_engine_began_goes_on(engine, have):
    whole = engine.run("json_schema", PERSON_TEXT, seed=3, n=2)
    resume = {i: Resumption(tuple(tokens[:have])) for i, tokens in whole.tokens.items()}
    rest = engine.run("json_schema", PERSON_TEXT, seed=3, n=2, resume=resume)
    for i, tokens in whole.tokens.items():
        assert tokens[:have] + rest.tokens[i] == tokens


def test_tokens_that_break_the_constraint_are_not_resumed(engine):
    resume = {0: Resumption(tuple(encode("[1")))}
    failure = engine.run("json_schema", PERSON_TEXT, resume=resume).failure
    assert failure.field == "constraint"
    assert "after the 2 tokens of output 0" in failure.message


def test_beams_that_a_constraint_leaves_fewer_of_than_their_width(engine):
    ended = engine.run("regex", "a|b", beam=BeamSearch(4))
    assert sorted(decode(ended.tokens[i]) for i in range(4)) == ["a", "a", "b", "b"]


@pytest.mark.parametrize("async_scheduling", [pytest.param(False, marks=pytest.mark.slow), True])
def test_late_masks_change_nothing(byte_model, engine, monkeypatch, async_scheduling):
    ways = (
        {"n": 3, "seed": 5},
        {"beam": BeamSearch(3)},
        {"temperature": 0.0, "prompt": range(40)},
        {"n": 2, "seed": 2, "frequency_penalty": 0.5},
    )
    plain = {"seed": 1, "max_tokens": 60}
    expected = [engine.run("json_schema", PERSON_TEXT, max_tokens=60, **way) for way in ways]
    expected.append(engine.run(None, **plain))
    few = {"num_blocks": 20, "max_model_len": 256}
    runner = Runner(byte_model, async_scheduling=async_scheduling, **few)
    advance, calls = Matcher.advance, itertools.count()

    def advance_late(matcher, token_ids, *guess):
        if next(calls) % 7 == 0:
            time.sleep(3 * GRACE_SECONDS)
        advance(matcher, token_ids, *guess)

    monkeypatch.setattr(Matcher, "advance", advance_late)
    try:
        asked = [runner.submit("json_schema", PERSON_TEXT, max_tokens=60, **way) for way in ways]
        asked.append(runner.submit(None, **plain))
        found = [runner.wait(request_id) for request_id in asked]
        assert [each.tokens for each in found] == [each.tokens for each in expected]
        assert runner.metrics.late_masks._value.get() > 20
        counters = runner.parts.scheduler.counters
        assert counters["preemptions_swap"] + counters["preemptions_recompute"] > 0
        runner.settle()
    finally:
        runner.close()


@pytest.mark.parametrize("async_scheduling", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_mask_that_takes_too_long_ends_its_request_alone(
    byte_model, monkeypatch, async_scheduling
):
    runner = Runner(byte_model, async_scheduling=async_scheduling)
    advance, ended = Matcher.advance, threading.Event()

    def advance_for_ever(matcher, token_ids, *guess):
        if list(token_ids) == encode("q"):
            until = time.thread_time() + 1
            while time.thread_time() < until and not ended.is_set():
                pass
        advance(matcher, token_ids, *guess)

    monkeypatch.setattr(Matcher, "advance", advance_for_ever)
    monkeypatch.setattr(mask_threads, "MAX_MASK_SECONDS", 0.1)
    try:
        slow = [runner.submit("regex", "q[ab]{20}", seed=i) for i in range(3)]
        for quick in (
            runner.run(None, max_tokens=100),
            runner.run("regex", "[ab]{50}"),
        ):
            assert quick.failure is None
        for request_id in slow:
            failure = runner.wait(request_id).failure
            assert (failure.code, failure.field) == (FailureCode.INVALID_ARGUMENT, "constraint")
            assert "a mask takes more than 0.1 s" in failure.message
        ended.set()
        runner.settle()
        assert decode(runner.run("regex", "after").tokens[0]) == "after"
    finally:
        runner.close()


@pytest.mark.parametrize(("way", "every"), [("swap", 1), ("recompute", 4)])
def test_preempting_all_the_time_changes_nothing(byte_model, engine, way, every):
    """Recomputing outputs that share a prompt takes up to three steps before a new token.

    First the prompt, then each output, then the beams' last tokens together. So a group that is
    preempted in every step would never progress. The scheduler never does that: it preempts the
    last group in order, so the first one progresses (`test_every_request_that_fits_is_finished`).
    """
    runner = Runner(byte_model, preemption=way)
    scheduler, schedule = runner.parts.scheduler, runner.parts.scheduler.schedule
    steps = itertools.count(1)

    def preempting():
        if scheduler.running and next(steps) % every == 0:
            scheduler._preempt(scheduler.running[-1])
        return schedule()

    scheduler.schedule = preempting
    try:
        for options in ({"n": 3, "seed": 5}, {"beam": BeamSearch(3)}):
            found = runner.run("json_schema", PERSON_TEXT, max_tokens=60, **options)
            expected = engine.run("json_schema", PERSON_TEXT, max_tokens=60, **options)
            assert found.tokens == expected.tokens
        assert scheduler.counters[f"preemptions_{way}"] > 50 / every
        runner.settle()
    finally:
        runner.close()
