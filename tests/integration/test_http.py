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


def test_echo_scores_prompts_as_grpc_does(served, client):
    with octavo.Client(served.address) as direct:
        tokens = direct.tokenize(PROMPT)
        expected = direct.generate(
            PROMPT, max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=1, token_ids=True,
            prompt_token_ids=True,
        ).complete()  # fmt: skip
    assert expected.prompt_token_ids == tokens
    # As lm-eval requests it: greedily, one token more than it scores.
    got = client.completions.create(
        model="demo",
        prompt=list(tokens),
        echo=True,
        logprobs=1,
        max_tokens=1,
        temperature=0,
        seed=1,
    )
    (choice,) = got.choices
    assert choice.text == PROMPT + expected.text
    shown = choice.logprobs
    assert shown.token_logprobs[0] is None
    scores = [one.logprob for one in (*expected.prompt_logprobs, *expected.outputs[0].logprobs)]
    assert shown.token_logprobs[1:] == pytest.approx(scores, abs=0.1)
    assert "".join(shown.tokens) == choice.text
    ends = [*shown.text_offset[1:], None]
    spans = [choice.text[start:end] for start, end in zip(shown.text_offset, ends, strict=True)]
    assert spans == shown.tokens
    assert max(shown.top_logprobs[-1].values()) == shown.token_logprobs[-1]


def test_prompts_are_scored_as_vllm_shows_it(client):
    asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 1}
    echoed = client.completions.create(**asked, echo=True, logprobs=2).choices[0].logprobs
    extra = {"prompt_logprobs": 2, "return_token_ids": True}
    choice = client.completions.create(**asked, extra_body=extra).choices[0]
    own = [
        None if scores is None else scores[str(token_id)]["logprob"]
        for token_id, scores in zip(choice.prompt_token_ids, choice.prompt_logprobs, strict=True)
    ]
    assert own[1:] == pytest.approx(echoed.token_logprobs[1:-1], abs=0.1)
    assert len(choice.token_ids) == 1


def test_outputs_of_some_tokens_and_without_some_words(served, client):
    asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
    free = client.completions.create(**asked).choices[0].text
    words = [" Rome", ":", " Milan and"]
    bound = client.completions.create(**asked, extra_body={"bad_words": words}).choices[0].text
    assert any(word in free for word in words)
    assert not any(word in bound for word in words)
    with octavo.Client(served.address) as direct:
        allowed = direct.tokenize(" Rome, Milan")
    extra = {"allowed_token_ids": list(allowed), "return_token_ids": True}
    listed = client.completions.create(**asked, extra_body=extra).choices[0]
    assert set(listed.token_ids) <= set(allowed)
    assert len(listed.token_ids) == 24


def test_an_answer_is_continued(client):
    opened = "The capital of France is"
    got = client.chat.completions.create(
        model="demo", temperature=0, max_tokens=3,
        messages=[{"role": "user", "content": "What is the capital of France?"},
                  {"role": "assistant", "content": opened}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )  # fmt: skip
    assert got.choices[0].message.content.startswith(" Paris")


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
