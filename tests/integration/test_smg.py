"""SMG's gateway, as PyPI has it, over engines: `pip install smg` beside the project."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI

from octavo.common.ports import free_port
from tests.integration.conftest import SMALL
from tests.integration.harness import wait_until

PROGRAM = shutil.which("smg", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="needs SMG: pip install smg"),
]
USER = [{"role": "user", "content": "Tell me about the capital of France."}]
GREEDY = {"model": "demo", "temperature": 0}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [7, 8]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]


class Gateway:
    """A gateway over some engines, in a process of its own."""

    def __init__(self, engines, log):
        self.port = free_port()
        urls = [f"grpc://{engine.address}" for engine in engines]
        ports = ["--port", str(self.port), "--prometheus-port", str(free_port())]
        arguments = ["launch", "--host", "127.0.0.1", *ports, "--worker-urls", *urls]
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [PROGRAM, *arguments, "--policy", "cache_aware", "--cache-threshold", "0.1"],
                stdout=sink,
                stderr=sink,
            )
        self.client = OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-")
        wait_until(lambda: self.ready(len(engines)), 60, f"the gateway of {log}")

    def ready(self, engines):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/workers", timeout=2) as page:
                workers = json.load(page)["workers"]
        except OSError:
            return False
        return sum(worker["is_healthy"] for worker in workers) == engines

    def chat(self, **options):
        options = {"messages": USER, "max_tokens": 40} | GREEDY | options
        return self.client.chat.completions.create(**options)

    def kill(self):
        self.process.kill()
        self.process.wait(10)


@pytest.fixture(scope="module")
def engines(launch_shared):
    started = [launch_shared("engine", "--model", "demo", *SMALL) for _ in range(2)]
    return [engine.wait_ready() for engine in started]


@pytest.fixture
def gateway(request, engines, tmp_path):
    """A gateway over as many engines as the parameter says."""
    gateway = Gateway(engines[: getattr(request, "param", 1)], tmp_path / "smg.log")
    yield gateway
    gateway.kill()


def used(engine):
    return engine.metric("octavo_engine_blocks", state="used")


def all_free(engines):
    wait_until(lambda: sum(map(used, engines)) == 0, 30, "no block in use")


@pytest.mark.parametrize("gateway", [1, 2], indirect=True)
def test_a_chat_is_answered_whole_and_streamed(gateway, engines):
    answer = gateway.chat(logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert answer.usage.completion_tokens >= len(choice.logprobs.content) > 5
    assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)
    chunks = list(gateway.chat(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == choice.message.content
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    stopped = gateway.chat(stop=["Paris"]).choices[0]
    assert choice.message.content.startswith(stopped.message.content)
    assert "Paris" not in stopped.message.content
    assert stopped.finish_reason == "stop"
    several = gateway.chat(n=3, seed=1, temperature=1)
    assert len({one.message.content for one in several.choices}) == 3
    all_free(engines)


def test_forms_and_tools(gateway, engines):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    person = json.loads(gateway.chat(response_format=form).choices[0].message.content)
    assert person.keys() == {"name", "age"}
    assert person["age"] in (7, 8)
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        answer = gateway.chat(
            messages=[{"role": "user", "content": "Weather in Rome?"}],
            tools=TOOLS,
            tool_choice=choice,
            max_tokens=100,
        )
        call, *_ = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
    for extra, fits in (
        ({"regex": "[0-9]{3}"}, str.isdigit),
        (
            {"ebnf": 'root ::= "yes" | "no"'},
            {"yes", "no"}.__contains__,
        ),
    ):
        assert fits(gateway.chat(extra_body=extra).choices[0].message.content)
    all_free(engines)


def test_blocks_are_free_when_clients_or_the_gateway_leave(gateway, engines):
    def begin():
        stream = gateway.chat(stream=True, max_tokens=1500, extra_body={"ignore_eos": True})
        next(iter(stream))
        return stream

    streams = [begin() for _ in range(4)]
    assert used(engines[0]) > 0
    for stream in streams:
        stream.close()
    all_free(engines)
    streams = [begin() for _ in range(4)]
    assert used(engines[0]) > 0
    gateway.kill()
    all_free(engines)


def test_prompts_go_where_their_prefix_is_cached(engines, tmp_path):
    """A gateway that has just started learns from the engines what each holds."""
    prefixes = [f"Story {i}. " + " ".join(f"word{i}{j}" for j in range(150)) for i in range(8)]

    def ask(gateway, prefix, question):
        messages = [{"role": "user", "content": f"{prefix} {question}"}]
        return gateway.chat(messages=messages, max_tokens=2).usage

    halves = [(engines[:1], prefixes[:4]), (engines[1:], prefixes[4:])]
    for i, (one, held) in enumerate(halves):
        gateway = Gateway(one, tmp_path / f"{i}.log")
        for prefix in held:
            ask(gateway, prefix, "What?")
        gateway.kill()
    gateway = Gateway(engines, tmp_path / "both.log")
    try:
        for prefix in prefixes:
            details = ask(gateway, prefix, "Why?").prompt_tokens_details
            assert details.cached_tokens > 300, prefix[:8]
    finally:
        gateway.kill()
    all_free(engines)
