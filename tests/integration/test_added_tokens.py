"""Outputs that must hold the texts of added tokens, from a real engine and router."""

import json

import grpc
import openai
import pytest
from transformers import AutoTokenizer

from octavo.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "Say it."}]
SETTINGS = {"messages": QUESTION, "model": "demo", "temperature": 0, "max_tokens": 200}
MARKERS = ["<|im_end|>", "<|endoftext|>", "<filename>", "<think>", "<tool_call>"]


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def _tool(text: str) -> dict:
    properties = {"a": {"const": text}, text: {"enum": [1]}}
    schema = {"type": "object", "properties": properties, "required": ["a", text]}
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize("text", MARKERS)
def test_over_http(client, text):
    def ask(**form):
        (choice,) = client.chat.completions.create(**SETTINGS, **form).choices
        assert choice.finish_reason in {"stop", "tool_calls"}
        return choice.message

    document = {"enum": [f"stop at {text} please"]}
    form = {"type": "json_schema", "json_schema": {"name": "d", "schema": document}}
    assert json.loads(ask(response_format=form).content) == f"stop at {text} please"
    unused = {"type": "function", "function": {"name": "now", "strict": True}}
    answered = ask(response_format=form, tools=[unused], tool_choice="auto")
    if not answered.tool_calls:
        assert json.loads(answered.content) == f"stop at {text} please"
    named = {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}
    form["json_schema"]["schema"] = {**named, "additionalProperties": False}
    assert json.loads(ask(response_format=form).content) == {text: 1}
    assert ask(extra_body={"guided_regex": text.replace("|", r"\|")}).content == text
    assert ask(extra_body={"guided_choice": [text]}).content == text
    assert ask(extra_body={"guided_grammar": f"start: {json.dumps(text)}"}).content == text
    (call,) = ask(tools=[_tool(text)], tool_choice="required").tool_calls
    assert json.loads(call.function.arguments) == {"a": text, text: 1}


def test_every_added_token_over_grpc(served, demo_model):
    added = AutoTokenizer.from_pretrained(demo_model).added_tokens_decoder.values()
    with grpc.insecure_channel(served.address) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        for text in (token.content for token in added):
            request = generation_pb2.GenerateRequest(
                text="Answer: ",
                constraint={"json_schema": json.dumps({"const": {"a": [text]}})},
                sampling=sampling_pb2.SamplingParams(temperature=1.0, n=3, seed=1),
                stop=sampling_pb2.StopConditions(max_tokens=200),
            )
            texts, reasons = ["", "", ""], []
            for response in stub.Generate(request):
                texts[response.delta.index] += response.delta.text
                if response.HasField("finished"):
                    reasons.append(response.finished.reason)
            assert reasons == [sampling_pb2.FINISH_REASON_EOS] * 3
            assert [json.loads(one) for one in texts] == [{"a": [text]}] * 3
