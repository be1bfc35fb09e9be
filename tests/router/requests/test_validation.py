import math

import grpc
import pytest

from octavo.common.limits import Limits
from octavo.common.rpc import RpcError
from octavo.router.requests import validation
from octavo.v1 import generation_pb2
from tests.plain import budget

LIMITS = Limits(
    max_model_len=128,
    vocab_size=1000,
    max_outputs=8,
    budgets=(budget(16, 16),),
    beam_search=False,
)
BEAMS = Limits(128, 1000, 8, (budget(16, 16),), beam_search=True)
NAN, INF = math.nan, math.inf


def request(**fields) -> generation_pb2.GenerateRequest:
    if not fields.keys() & {"text", "chat", "tokens"}:
        fields["text"] = "hi"
    return generation_pb2.GenerateRequest(**fields)


def check(message):
    validation.check_request_id(message.request_id)
    validation.check_request(message, LIMITS)


def sampling(field, value, shown, path=None):
    return (request(sampling={field: value}), path or f"sampling.{field}", shown)


BAD = [
    (generation_pb2.GenerateRequest(), "prompt", "must be set"),
    (request(text=""), "text", "at least one"),
    (request(tokens={}), "tokens.token_ids", "at least one"),
    (request(chat={}), "chat.messages", "at least one"),
    (request(tokens={"token_ids": [1, 1000]}), "tokens.token_ids[1]", "[0, 999]"),
    (
        request(chat={"messages": [{"role": "king"}]}),
        "chat.messages[0].role",
        "system, developer, user",
    ),
    (request(request_id="a b"), "request_id", "visible ASCII"),
    (request(request_id="é"), "request_id", "visible ASCII"),
    (request(request_id="x" * 129), "request_id", "128"),
    (request(cache_salt="x" * 129), "cache_salt", "at most 128 characters; it has 129"),
    (request(priority=101), "priority", "[-100, 100]"),
    (request(priority=-101), "priority", "[-100, 100]"),
    sampling("n", 0, "[1, 8]"),
    sampling("n", 9, "[1, 8]"),
    *(sampling("temperature", v, "[0, 100]") for v in (-0.1, 100.5, NAN, INF, -INF)),
    *(sampling("top_p", v, "(0, 1]") for v in (0, -1, 1.01, NAN, INF)),
    *(sampling("min_p", v, "[0, 1]") for v in (-0.1, 1.01, NAN, INF)),
    *(sampling("repetition_penalty", v, "(0, 100]") for v in (0, -1, 101, NAN, INF)),
    *(sampling("presence_penalty", v, "[-2, 2]") for v in (-2.1, 2.1, NAN, -INF)),
    *(sampling("frequency_penalty", v, "[-2, 2]") for v in (-2.1, 2.1, NAN, INF)),
    sampling(
        "logit_bias",
        dict.fromkeys(range(999), 1.0) | {1000: 1.0},
        "[0, 999]",
        "sampling.logit_bias[1000]",
    ),
    sampling("logit_bias", dict.fromkeys(range(1025), 1.0), "1024"),
    *(
        sampling("logit_bias", {7: v}, "[-100, 100]", "sampling.logit_bias[7]")
        for v in (101, -101, NAN, INF)
    ),
    (request(stop={"max_tokens": 0}), "stop.max_tokens", "[1, 127]"),
    (request(stop={"max_tokens": 5, "min_tokens": 6}), "stop.min_tokens", "[0, 5]"),
    (request(stop={"strings": ["x"] * 17}), "stop.strings", "16"),
    (request(stop={"strings": ["x", ""]}), "stop.strings[1]", "1 to 256"),
    (request(stop={"strings": ["x" * 257]}), "stop.strings[0]", "1 to 256"),
    (request(stop={"token_ids": [0] * 257}), "stop.token_ids", "256"),
    (request(stop={"token_ids": [1000]}), "stop.token_ids[0]", "[0, 999]"),
    (request(output={"logprobs": 21}), "output.logprobs", "[0, 20]"),
    (request(output={"prompt_logprobs": 21}), "output.prompt_logprobs", "[0, 20]"),
    (request(beam={"width": 2}, sampling={}), "beam", "excludes sampling"),
]


@pytest.mark.parametrize(
    ("message", "field", "says"), BAD, ids=lambda v: v if isinstance(v, str) else ""
)
def test_bad_requests(message, field, says):
    with pytest.raises(RpcError) as caught:
        check(message)
    error = caught.value
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert error.field == field
    assert says in error.message
    assert field.partition("[")[0].rpartition(".")[2] in error.message


GOOD = [
    request(),
    request(tokens={"token_ids": [0, 999]}),
    request(chat={"messages": [{"role": r, "content": ""} for r in validation.ROLES]}),
    request(request_id="!~" * 64, priority=-100),
    request(cache_salt="ü " * 64),
    request(sampling={"temperature": 0, "n": 8, "top_p": 1, "min_p": 1, "top_k": 2**32 - 1}),
    request(sampling={"temperature": 100, "repetition_penalty": 100, "presence_penalty": -2}),
    request(sampling={"logit_bias": dict.fromkeys(range(1000), 100.0)}),
    request(stop={"max_tokens": 1, "min_tokens": 1, "strings": ["é" * 256] * 16}),
    request(output={"logprobs": 20, "prompt_logprobs": 0}),
]


@pytest.mark.parametrize("message", GOOD)
def test_good_requests(message):
    check(message)


def test_beam_search():
    message = request(beam={"width": 2})
    with pytest.raises(RpcError) as caught:
        validation.check_request(message, LIMITS)
    assert caught.value.code is grpc.StatusCode.UNIMPLEMENTED
    validation.check_request(message, BEAMS)
    for bad in ({"width": 0}, {"width": 9}, {"width": 1, "length_penalty": NAN}):
        with pytest.raises(RpcError) as caught:
            validation.check_request(request(beam=bad), BEAMS)
        assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("fields", "prompt", "field", "says"),
    [
        ({}, 0, "prompt", "at least one token"),
        ({}, 128, "prompt", "at most 127 tokens"),
        ({}, 128, "prompt", "it has 128"),
        ({"stop": {"max_tokens": 29}}, 100, "stop.max_tokens", "[1, 28]"),
        ({"stop": {"min_tokens": 29}}, 100, "stop.min_tokens", "[0, 28]"),
        # 15 more blocks for 8 outputs is one each, and one token needs no place.
        ({"sampling": {"n": 8}, "stop": {"max_tokens": 18}}, 16, "stop.max_tokens", "[1, 17]"),
    ],
)
def test_lengths(fields, prompt, field, says):
    with pytest.raises(RpcError) as caught:
        validation.output_length(request(**fields), prompt, LIMITS)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.field == field
    assert says in caught.value.message


def test_prompt_that_never_fits_in_the_blocks():
    small = Limits(1024, 1000, 8, (budget(4, 16),), beam_search=False)
    assert validation.output_length(request(), 64, small) == 1
    with pytest.raises(RpcError, match="4 KV-cache blocks of 16"):
        validation.output_length(request(), 65, small)
    # Without max_tokens an output may be as long as the blocks allow.
    assert validation.output_length(request(), 60, small) == 5


def test_default_length_is_what_the_context_leaves():
    assert validation.output_length(request(), 100, LIMITS) == 28
    assert validation.output_length(request(stop={"max_tokens": 3}), 127 - 2, LIMITS) == 3
    assert validation.output_length(request(sampling={"n": 8}), 16, LIMITS) == 17
