"""A Submit becomes a request or is refused, even with values that a router never sends."""

import time
from dataclasses import replace

import grpc
import pytest

from octavo.common.limits import Limits
from octavo.common.rpc import RpcError
from octavo.engine.constraints.constraint import Constraint, ConstraintKind
from octavo.engine.rpc.validation import to_request
from octavo.v1 import engine_pb2
from tests.plain import budget

LIMITS = Limits(
    max_model_len=128,
    vocab_size=1000,
    max_outputs=8,
    budgets=(budget(16, 16),),
    beam_search=False,
)


def translate(**fields):
    submit = engine_pb2.Submit(**{"request_id": "r", "prompt_token_ids": [1, 2, 3]} | fields)
    return to_request(submit, session=0, limits=LIMITS, eos_token_ids=[2])


@pytest.mark.parametrize("seconds", [2**63 - 1, -(2**63), 0])
def test_any_timeout_gives_a_deadline(seconds):
    request = translate(timeout={"seconds": seconds, "nanos": 500_000_000})
    assert request.deadline == pytest.approx(time.monotonic() + seconds + 0.5, abs=5)


def test_no_timeout_gives_none():
    assert translate().deadline is None


def test_a_long_request_id_is_refused():
    assert translate(request_id="r" * 128).request_id == "r" * 128
    with pytest.raises(RpcError, match="at most 128 characters; it has 129") as caught:
        translate(request_id="r" * 129)
    assert caught.value.field == "request_id"


def test_numbers_of_outputs_fit():
    assert translate(first_number=2**64 - 2).first_number == 2**64 - 2
    with pytest.raises(RpcError, match="at most 18446744073709551614 with 1 outputs") as caught:
        translate(first_number=2**64 - 1)
    assert caught.value.field == "first_number"


def test_a_salt_is_kept_and_a_long_one_refused():
    assert translate(cache_salt="s" * 128).cache_salt == "s" * 128
    with pytest.raises(RpcError, match="at most 128 characters; it has 129") as caught:
        translate(cache_salt="s" * 129)
    assert caught.value.field == "cache_salt"


CONSTRAINED = replace(LIMITS, constraints=True)


def constrain(limits=CONSTRAINED, **constraint):
    submit = engine_pb2.Submit(request_id="r", prompt_token_ids=[1], constraint=constraint)
    submit.stop.ignore_eos = True
    return to_request(submit, session=0, limits=limits, eos_token_ids=[2])


@pytest.mark.parametrize(
    ("constraint", "texts"),
    [
        ({"json_schema": "{}"}, ("{}",)),
        ({"json_object": True}, ()),
        ({"regex": "a+"}, ("a+",)),
        ({"grammar": 'start: "a"'}, ('start: "a"',)),
        ({"choices": {"values": ["a", "b"]}}, ("a", "b")),
    ],
)
def test_a_constraint_of_each_kind(constraint, texts):
    (kind,) = constraint
    request = constrain(**constraint)
    assert request.constraint == Constraint(ConstraintKind(kind), texts)
    assert request.eos_token_ids == {2}  # an end is allowed where nothing else can follow
    assert request.end_rule.never == {2}


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        ({}, "constraint"),
        ({"json_object": False}, "constraint.json_object"),
        ({"regex": ""}, "constraint.regex"),
        ({"json_schema": "x" * (1 << 20)}, "constraint.json_schema"),
        ({"choices": {}}, "constraint.choices.values"),
        ({"choices": {"values": ["a", ""]}}, "constraint.choices.values"),
        ({"choices": {"values": ["a"] * 1025}}, "constraint.choices.values"),
    ],
)
def test_a_constraint_that_is_none_is_refused(constraint, field):
    with pytest.raises(RpcError) as caught:
        constrain(**constraint)
    assert caught.value.field == field
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_an_engine_without_a_tokenizer_takes_no_constraint():
    with pytest.raises(RpcError, match="needs the model's tokenizer") as caught:
        constrain(LIMITS, regex="a")
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED


def test_without_a_seed_each_request_has_its_own():
    assert len({translate(sampling={"temperature": 1.0}).sampling.seed for _ in range(8)}) == 8
    assert translate(sampling={"seed": 0}).sampling.seed == 0
    assert translate(sampling={"seed": 2**64 - 1}).sampling.seed == 2**64 - 1
