"""OpenAI's own client of Responses with a real server, sync and asyncio, whole and streamed.

The demo model is small: the request forces the call.
"""

import json

import openai
import pytest
from pydantic import BaseModel

TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
    "strict": False,
}
SETTINGS = {"model": "demo", "temperature": 0, "max_output_tokens": 60}
QUESTION = "What is the weather in Paris?"


class Person(BaseModel, extra="forbid"):
    name: str
    age: int


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_stored_conversation_with_a_call(client):
    first = client.responses.create(
        **SETTINGS, input=QUESTION, tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = first.output
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "22 degrees"}
    second = client.responses.create(
        **SETTINGS, input=[result], previous_response_id=first.id, tools=[TOOL]
    )
    assert second.output
    assert second.usage.input_tokens_details.cached_tokens > 0
    client.responses.delete(first.id)


def test_a_stream_is_the_whole_answer(client):
    whole = client.responses.create(**SETTINGS, input=QUESTION, top_logprobs=2,
                                    include=["message.output_text.logprobs"])  # fmt: skip
    tokens = whole.output[0].content[0].logprobs
    assert "".join(one.token for one in tokens) == whole.output_text
    assert all(len(one.top_logprobs) == 2 for one in tokens)
    with client.responses.stream(**SETTINGS, input=QUESTION) as stream:
        pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
    assert "".join(pieces) == whole.output_text


def test_a_schema(client):
    asked = {"model": "demo", "input": "Bob is 5 years old.", "max_output_tokens": 300}
    assert isinstance(client.responses.parse(**asked, text_format=Person).output_parsed, Person)


async def test_asyncio(served):
    async with openai.AsyncOpenAI(base_url=f"{served.http}/v1", api_key="none") as client:
        whole = await client.responses.create(**SETTINGS, input=QUESTION)
        stream = await client.responses.create(**SETTINGS, input=QUESTION, stream=True)
        *_, last = [event async for event in stream]
        assert last.response.output_text == whole.output_text
        assert (await client.responses.retrieve(whole.id)).output_text == whole.output_text
