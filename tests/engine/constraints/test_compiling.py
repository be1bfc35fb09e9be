"""Constraints are compiled beside the steps, once, and within limits."""

import json
import random
import threading
import time

import pytest

from octavo.common.models.errors import ModelError
from octavo.engine.constraints.compiler import (
    ConstraintCompiler,
    Preparation,
    TokensMissingError,
)
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.constraints.mask_threads import MaskThreads
from octavo.engine.constraints.matcher import EndRule
from octavo.engine.events import FailureCode
from tests.engine.constraints.hostile import hostile
from tests.engine.constraints.runner import Runner, decode

SLOW = json.dumps({"allOf": [{"type": "integer", "multipleOf": p} for p in (10007, 10009, 10037)]})
"""A schema that takes more than a minute to compile."""


@pytest.fixture(scope="module")
def hasty(byte_model):
    """An engine that refuses constraints that take longer than a second to compile."""
    runner = Runner(byte_model, seconds=1)
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("json_schema", '{"properties": {"a/b": {"not": {}}}}', "#/properties/a~1b/not: "),
        (
            "json_schema",
            '{"items": {"type": "string", "format": "odd"}}',
            "#/items/format: not supp",
        ),
        (
            "json_schema",
            '{"$ref": "#/$defs/a", "$defs": {"a": {"uniqueItems": true}}}',
            "#/$defs/a/un",
        ),
        ("json_schema", '{"type": "object", "minProperties": 2}', "#/minProperties: "),
        ("json_schema", '{"x-guidance": {"lenient": true}}', "#/x-guidance/lenient: "),
        ("json_schema", r'{"const": {"a": ["x\u0000"]}}', "#/const: control characters"),
        ("json_schema", r'{"items": {"pattern": "a\\x01"}}', "#/items/pattern: control"),
        ("json_schema", r'{"patternProperties": {"[\\v]": {}}}', "#/patternProperties: control"),
        ("json_schema", '{"$ref": "http://elsewhere/schema"}', "http://elsewhere/schema"),
        ("json_schema", '{"type": "odd"}', "Invalid type: odd"),
        ("json_schema", "false", "it is false"),
        ("json_schema", '{"allOf": [{"type": "string"}, {"type": "null"}]}', "nsatisfiable"),
        ("json_schema", '{"type"', "line 1 column 7"),
        ("json_schema", "[1]", "must be a JSON object or a boolean"),
        ("regex", "a(b", "unclosed group"),
        ("regex", "(?=a)", "look-around"),
        ("grammar", 'start: "a" b', "unknown name"),
        ("grammar", 'start: "a"\n%json {"not": {}}', "2(1): expecting rule"),
        ("grammar", 'start: %json {"x-guidance": {"coerce_one_of": true}}', "coerce_one_of"),
        ("grammar", "start: <|odd|>", "unknown special token"),
        ("grammar", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(50_000)), "deeply"),
        ("json_schema", SLOW, "takes more than 1 s to compile"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_place(hasty, kind, text, message):
    failure = hasty.run(kind, text).failure
    assert failure is not None
    assert (failure.code, failure.field) == (FailureCode.INVALID_ARGUMENT, "constraint")
    assert message in failure.message
    assert hasty.run("regex", "ab?", max_tokens=9).failure is None


def test_a_name_cannot_be_written_otherwise(engine):
    schema = {"properties": {"ab": {"const": 1}}, "additionalProperties": {"const": "x"}}
    table = engine.parts.read_tokens()
    compiled = _state(engine, json.dumps(schema))
    tokens = table.build()
    for text, allowed in (
        ('{"ab":1}', True),
        ('{"ab":"x"}', False),
        ('{"a\\u0062":"x"}', False),
        ('{"abc":"x"}', True),
        ('{"a\\n":"x"}', True),
    ):
        ids = tokens.tokenize_str(text)
        assert (compiled.deep_copy().try_consume_tokens(ids) == len(ids)) == allowed, text


def _state(engine, schema):
    engine.run("json_schema", schema)
    constraint = Constraint(ConstraintKind.JSON_SCHEMA, (schema,))
    return engine.compiler._cache[constraint].state


def test_equal_constraints_are_compiled_once(engine):
    before = engine.compiler.counters["compiled"]
    asked = [engine.submit("regex", "once[ab]", seed=i) for i in range(8)]
    texts = {decode(engine.wait(request_id).tokens[0]) for request_id in asked}
    assert texts <= {"oncea", "onceb"}
    assert engine.compiler.counters["compiled"] == before + 1


def test_the_cache_is_bounded(byte_model):
    runner = Runner(byte_model, cache_bytes=1)
    try:
        for i in range(3):
            assert decode(runner.run("regex", f"{i}").tokens[0]) == f"{i}"
        assert not runner.compiler._cache
    finally:
        runner.close()


def test_nobody_waits_for_a_constraint_that_compiles(hasty):
    slow = [hasty.submit("json_schema", SLOW + " " * i) for i in range(1, 7)]
    began = time.monotonic()
    assert hasty.run(None, max_tokens=50).reasons == {0: "LENGTH"}
    assert time.monotonic() - began < 5
    assert any(map(hasty.runs, slow))
    for request_id in slow[:4]:  # cancelled while compiling or waiting for it
        hasty.abort(request_id)
    late = hasty.submit("regex", "x" * 3, deadline=time.monotonic() + 0.05)
    assert hasty.wait(late).failure.code == FailureCode.DEADLINE_EXCEEDED
    for request_id in slow[4:]:
        assert hasty.wait(request_id).failure.code == FailureCode.INVALID_ARGUMENT
    hasty.settle()


def test_a_drained_engine_waits_for_what_compiles(byte_model):
    runner = Runner(byte_model)
    try:
        request_id = runner.submit("regex", "drained")
        runner.core.drain()
        assert decode(runner.wait(request_id).tokens[0]) == "drained"
        assert runner.run("regex", "b").failure.code == FailureCode.UNAVAILABLE
    finally:
        runner.close()


def test_a_tokenizer_that_cannot_be_read_is_a_precondition():
    def read():
        raise ModelError("no tokenizer")

    compiler = ConstraintCompiler(read, seconds=1, cache_bytes=1)
    done, outcomes = threading.Event(), []
    constraint = Constraint(ConstraintKind.REGEX, ("a",))
    compiler.prepare(
        Preparation(constraint, [()], EndRule(), lambda o: (outcomes.append(o), done.set()))
    )
    assert done.wait(20)
    assert isinstance(outcomes[0], TokensMissingError)
    compiler.close()


@pytest.mark.parametrize("count", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_hostile_constraints_are_refused_or_served(hasty, count):
    draw = random.Random(count)
    asked = [hasty.submit(*hostile(draw), max_tokens=8) for _ in range(count)]
    neighbour = hasty.run(None, max_tokens=100)
    assert len(neighbour.tokens[0]) == 100
    for request_id in asked:
        ended = hasty.wait(request_id, 240)
        assert ended.failure is None or ended.failure.field == "constraint"
    hasty.settle()


class SlowMatcher:
    """A matcher whose mask takes a set time."""

    def __init__(self, seconds, waits=0.0):
        self.seconds, self.quick = seconds, seconds < 1
        self.waits, self.error, self.length = waits, None, 0
        self.ready, self.awaited = True, False

    def advance(self, token_ids, _guess):
        time.sleep(self.waits)
        self.error = "it fails" if token_ids == ["fail"] else None
        self.ready = self.error is None


def test_a_step_waits_for_quick_masks_alone():
    late = threading.Event()
    threads = MaskThreads(late.set)
    assert threads.wait() is None
    quick, slow, turned = SlowMatcher(0), SlowMatcher(1, 0.2), SlowMatcher(0, 0.2)
    for matcher in (quick, slow):
        threads.request("owner", matcher, [1])
    seconds, count = threads.wait()
    assert (quick.ready, slow.ready, count) == (True, False, 1)
    assert seconds < 0.1
    assert late.wait(5)
    assert slow.ready
    late.clear()
    threads.request("owner", turned, ["fail"])
    assert threads.wait()[1] == 1
    assert late.wait(5)
    ((owner, fault),) = threads.failures()
    assert owner == "owner"
    assert "after 0 tokens of the output: it fails" in fault
    assert threads.failures() == []
