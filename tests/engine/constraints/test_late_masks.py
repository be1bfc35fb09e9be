"""A token is sampled under its own position's mask, whenever that mask is ready."""

import json
import re
import time
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from octavo.engine.compilation.traced_forward import TracedForward
from octavo.engine.constraints.mask_threads import GRACE_SECONDS
from octavo.engine.constraints.matcher import Matcher
from octavo.engine.speculation.methods import make_speculation
from octavo.kernels.logits import mask_logits
from tests.engine.constraints.runner import Runner, decode
from tests.engine.constraints.schemas import check

SLOWEST = pytest.param(0.03, marks=pytest.mark.slow)
CALL = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Pau"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALL_PATTERN = r'\{"city": "(Paris|Pau)", "days": [0-9]{1,2}\}'
WAYS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "prompt": range(30)},
    {"temperature": 0.0, "logit_bias": {40: 3.0, 60: 2.0}},
    {"seed": 3},
    {"seed": 4, "n": 2, "frequency_penalty": 0.5},
    {"seed": 5, "logit_bias": {40: 3.0}},
)


class GreedyForward(TracedForward):
    """A step that samples its tokens itself, as a traced step does, from an untraced model."""

    def __init__(self, step, seconds):
        self._step, self._seconds = step, seconds
        self.taken = 0

    def __call__(self, *inputs):
        time.sleep(self._seconds)
        return self._step(*inputs)

    def most_likely(self, token_ids, positions, logit_rows, masks=None):
        masks = {row: mask.copy() for row, mask in (masks or {}).items()}
        logits = self(token_ids, positions, logit_rows).float()
        if masks:
            masked = logits[list(masks)]
            mask_logits(masked, list(range(len(masks))), np.stack(list(masks.values())))
            logits[list(masks)] = masked
        self.taken += 1
        return torch.argmax(logits, -1).tolist()


def run(runner, count):
    """Run requests, constrained ones and others; return their tokens and ends."""
    asked = []
    for number in range(count):
        way = {"max_tokens": 24} | WAYS[number % len(WAYS)]
        if number % 5 == 4:
            asked.append(runner.submit(None, **(way | {"max_tokens": 12})))
        else:
            asked.append(runner.submit("json_schema", json.dumps(CALL), **way))
    ended = [runner.wait(request_id) for request_id in asked]
    runner.settle()
    for number, each in enumerate(ended):
        assert each.failure is None, (number, each.failure)
        for index, reason in each.reasons.items():
            if number % 5 != 4 and reason == "EOS":
                check(decode(each.tokens[index]), CALL)
    return [(dict(each.tokens), each.reasons) for each in ended]


@pytest.fixture(scope="module")
def expected(engine):
    return run(engine, 12)


@contextmanager
def delayed(model, monkeypatch, seconds, *, steps=0.012, **settings):
    """Run an engine with slow masks; unless async, its step samples the tokens itself."""
    runner, advance = Runner(model, **settings), Matcher.advance

    def late(matcher, *arguments):
        time.sleep(seconds)
        advance(matcher, *arguments)

    monkeypatch.setattr(Matcher, "advance", late)
    loaded = runner.parts.executor._loaded
    if steps is not None and not settings.get("async_scheduling"):
        object.__setattr__(loaded, "forward", GreedyForward(loaded.forward, steps))
    try:
        yield runner
    finally:
        runner.close()


WHEN = pytest.mark.parametrize(
    "seconds", [0.0, pytest.param(0.003, marks=pytest.mark.slow), 0.009, SLOWEST]
)


@pytest.mark.few(2)
@WHEN
@pytest.mark.parametrize(
    ("async_scheduling", "speculation"), [(False, None), (True, None), (False, "suffix")]
)
def test_outputs_do_not_depend_on_when_masks_are_ready(
    byte_model, expected, monkeypatch, seconds, async_scheduling, speculation
):
    way = {"async_scheduling": async_scheduling}
    with delayed(byte_model, monkeypatch, seconds, **way) as runner:
        if speculation is not None:
            runner.parts.scheduler.speculation = make_speculation(speculation, 4)
        assert run(runner, len(expected)) == expected
        if seconds > GRACE_SECONDS:
            assert runner.metrics.late_masks._value.get() > 10


@WHEN
@pytest.mark.parametrize("count", [8, pytest.param(125, marks=pytest.mark.slow)])
def test_tokens_that_the_model_takes_are_drawn_under_their_own_masks(
    byte_model, monkeypatch, seconds, count
):
    """All rows are greedy. Some masks become ready while the model runs, after it read them."""
    with delayed(byte_model, monkeypatch, seconds) as runner:
        asked = [
            runner.submit("regex", CALL_PATTERN, prompt=range(1, 3 + i % 3), temperature=0.0)
            for i in range(count)
        ]
        ended = [runner.wait(request_id) for request_id in asked]
        runner.settle()
        assert runner.parts.executor._loaded.forward.taken > 20
    assert [each.failure for each in ended] == [None] * count
    for i, each in enumerate(ended):
        assert re.fullmatch(CALL_PATTERN, decode(each.tokens[0]))
        assert (each.tokens, each.reasons) == (ended[i % 3].tokens, {0: "EOS"})


@pytest.mark.parametrize(
    "seconds", [0.009, *(pytest.param(s, marks=pytest.mark.slow) for s in (0.003, 0.03))]
)
def test_traced_forwards_draw_under_the_masks_that_they_read(byte_model, monkeypatch, seconds):
    settings = {"compile": "auto", "dtype": "bfloat16", "steps": None}
    with delayed(byte_model, monkeypatch, seconds, **settings) as runner:
        asked = [
            runner.submit("regex", CALL_PATTERN, prompt=range(1, 3 + i % 3), temperature=0.0)
            for i in range(60)
        ]
        for request_id in asked:
            ended = runner.wait(request_id)
            assert ended.failure is None
            assert re.fullmatch(CALL_PATTERN, decode(ended.tokens[0]))
