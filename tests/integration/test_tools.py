"""Calls of tools with real engines: what is forced stays the same when an engine is killed."""

import json

import grpc
import jsonschema
import pytest

from octavo.v1 import generation_pb2, generation_pb2_grpc
from octavo.v1.sampling_pb2 import FinishReason
from tests.integration.conftest import SMALL
from tests.integration.harness import wait_until

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "hours": {"type": "array", "items": {"type": "integer"}, "minItems": 12, "maxItems": 30},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "hours", "unit"],
}
TOOL = {"name": "get_weather", "description": "The weather", "parameters": json.dumps(SCHEMA)}
KILL_AFTER = 12
"""Messages of a stream after which its engine is killed."""


def ask(seed: int) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(
        chat={
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [TOOL, {"name": "now"}],
            "tool_choice": {"name": "get_weather"},
            "parallel_tool_calls": False,
        },
        sampling={"temperature": 1.2, "seed": seed},
        stop={"max_tokens": 300},
    )


def call_of(stream, after_message=lambda number: None) -> tuple[str, str, int]:
    """Return name and arguments of the one call of a stream, and why it ended."""
    name = arguments = ""
    reason = 0
    for number, response in enumerate(stream):
        assert not response.delta.text
        for piece in response.delta.tool_calls:
            assert piece.index == 0
            name += piece.name
            arguments += piece.arguments
        reason = reason or response.finished.reason
        after_message(number)
    return name, arguments, reason


@pytest.mark.slow
def test_a_forced_call_survives_its_engine(demo_model, launch):
    engines = [launch("engine", "--model", str(demo_model), *SMALL) for _ in range(2)]
    flags = [flag for engine in engines for flag in ("--engine", engine.address)]
    router = launch("router", *flags).wait_ready()
    for engine in engines:
        engine.wait_ready()
    with grpc.insecure_channel(router.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        wait_until(lambda: router.metric("octavo_router_engines_up") == 2, 60, "two engines")
        undisturbed = call_of(stub.Generate(ask(1)))

        def kill(number: int) -> None:
            if number == KILL_AFTER:
                busy = [e for e in engines if e.metric("octavo_engine_groups", state="running")]
                busy[0].kill()

        assert call_of(stub.Generate(ask(1)), kill) == undisturbed
        assert router.metric("octavo_router_migrations_total") == 1
    name, arguments, reason = undisturbed
    assert (name, reason) == ("get_weather", FinishReason.FINISH_REASON_TOOL_CALLS)
    jsonschema.validate(json.loads(arguments), SCHEMA)
