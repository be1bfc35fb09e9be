import asyncio

from opentelemetry.semconv._incubating.metrics import gen_ai_metrics as conventions
from prometheus_client import CollectorRegistry

from octavo.router.gen_ai_metrics import GenAiMetrics
from octavo.v1 import generation_pb2

REQUEST = "gen_ai_server_request_duration_seconds"
FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
OUTPUT_TOKEN = "gen_ai_server_time_per_output_token_seconds"
TOKENS = "gen_ai_client_token_usage"
BOUNDARIES = {
    REQUEST: "0.01 0.02 0.04 0.08 0.16 0.32 0.64 1.28 2.56 5.12 10.24 20.48 40.96 81.92",
    FIRST_TOKEN: "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10",
    OUTPUT_TOKEN: "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5",
    TOKENS: "1 4 16 64 256 1024 4096 16384 65536 262144 1048576 4194304 16777216 67108864",
}
"""Histogram boundaries that the conventions recommend."""

TEXT = {
    "gen_ai_operation_name": "text_completion",
    "gen_ai_provider_name": "octavo",
    "gen_ai_request_model": "tiny",
}
CHAT = {**TEXT, "gen_ai_operation_name": "chat"}


def test_names_are_the_conventions():
    seconds = [
        conventions.GEN_AI_SERVER_REQUEST_DURATION,
        conventions.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
        conventions.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
    ]
    expected = [f"{name}_seconds" for name in seconds] + [conventions.GEN_AI_CLIENT_TOKEN_USAGE]
    registry = CollectorRegistry()
    GenAiMetrics(registry)
    made = [family.name for family in registry.collect()]
    assert made == [name.replace(".", "_") for name in expected] == list(BOUNDARIES)


async def served(s, *requests: generation_pb2.GenerateRequest) -> CollectorRegistry:
    """The metrics after a router has answered and refused requests."""
    await s.up()
    calls = [s.stub.Generate(request) for request in requests]
    await asyncio.gather(*(answers(call) for call in calls), return_exceptions=True)
    await s.clean()
    return s.router.registry


async def answers(call) -> list[generation_pb2.GenerateResponse]:
    return [response async for response in call]


async def test_a_chat_and_a_completion_with_two_outputs(scripted, serve):
    chat = generation_pb2.GenerateRequest(chat={"messages": [{"role": "user", "content": "hi"}]})
    text = generation_pb2.GenerateRequest(text="prompt", sampling={"n": 2})
    async with serve(scripted()) as s:
        registry = await served(s, chat, text)
    answer = len("hello world")
    for own, outputs in (CHAT, 1), (TEXT, 2):
        duration = {**own, "error_type": ""}
        assert value(registry, f"{REQUEST}_count", duration) == 1
        assert value(registry, f"{FIRST_TOKEN}_count", own) == 1
        assert value(registry, f"{OUTPUT_TOKEN}_count", own) == outputs
        used = {kind: {**own, "gen_ai_token_type": kind} for kind in ("input", "output")}
        assert value(registry, f"{TOKENS}_count", used["input"]) == 1
        assert value(registry, f"{TOKENS}_count", used["output"]) == 1
        assert value(registry, f"{TOKENS}_sum", used["output"]) == outputs * answer
        later = value(registry, f"{OUTPUT_TOKEN}_sum", own) / outputs * (answer - 1)
        first = value(registry, f"{FIRST_TOKEN}_sum", own)
        assert 0 < first + later <= value(registry, f"{REQUEST}_sum", duration)
    prompt = {**TEXT, "gen_ai_token_type": "input"}
    assert value(registry, f"{TOKENS}_sum", prompt) == len("prompt")
    assert {name: boundaries(registry, name) for name in BOUNDARIES} == {
        name: list(map(float, text.split())) for name, text in BOUNDARIES.items()
    }


async def test_a_refused_request_has_a_duration_with_its_status_and_nothing_else(scripted, serve):
    async with serve(scripted()) as s:
        registry = await served(s, generation_pb2.GenerateRequest(text=""))
    refused = {**TEXT, "error_type": "INVALID_ARGUMENT"}
    assert value(registry, f"{REQUEST}_count", refused) == 1
    assert value(registry, f"{FIRST_TOKEN}_count", TEXT) is None
    assert value(registry, f"{TOKENS}_count", {**TEXT, "gen_ai_token_type": "input"}) is None


def value(registry: CollectorRegistry, name: str, labels: dict[str, str]) -> float | None:
    return registry.get_sample_value(name, labels)


def boundaries(registry: CollectorRegistry, name: str) -> list[float]:
    """Return the upper bounds of a histogram's buckets, except infinity."""
    (family,) = [family for family in registry.collect() if family.name == name]
    ends = {float(s.labels["le"]) for s in family.samples if s.name == f"{name}_bucket"}
    return sorted(ends)[:-1]
