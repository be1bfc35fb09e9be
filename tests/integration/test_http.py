"""HTTP of a real server: the same answers as over gRPC, and the same memory afterwards."""

import subprocess
import sys
from pathlib import Path

import openai
import pytest

import octavo
from tests.integration.harness import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_chat.py"
PROMPT = "The three largest cities of Italy are"


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_answers_are_those_of_grpc(served, client):
    settings = {"temperature": 0, "max_tokens": 12}
    got = client.completions.create(model="demo", prompt=PROMPT, logprobs=0, **settings)
    with octavo.Client(served.address) as direct:
        expected = direct.generate(PROMPT, logprobs=0, token_ids=True, **settings).complete()
    assert got.choices[0].text == expected.text
    assert "".join(got.choices[0].logprobs.tokens) == expected.text
    assert got.usage.completion_tokens == expected.usage.output_tokens


def test_beam_search(served, client):
    settings = {"max_tokens": 8, "extra_body": {"beam_width": 3}}
    got = client.completions.create(model="demo", prompt=PROMPT, n=2, **settings)
    with octavo.Client(served.address) as direct:
        expected = direct.generate(PROMPT, max_tokens=8, beam_width=3).complete()
    assert [choice.text for choice in got.choices] == list(expected.texts[:2])


def test_a_client_that_leaves_frees_the_blocks(served, client):
    def used() -> float:
        port = served.metrics_port + 1
        return served.metric("octavo_engine_blocks", port=port, state="used")

    stream = client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Count to a thousand."}],
        n=4, stream=True, max_tokens=1500, extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    wait_until(lambda: used() > 0, what="blocks in use")
    stream.close()
    wait_until(lambda: used() == 0, timeout=30, what="no block in use")


def test_the_example(served):
    done = subprocess.run(
        [sys.executable, EXAMPLE, f"{served.http}/v1"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "The capital of France is Paris." in done.stdout
    assert "tokens by demo" in done.stdout
