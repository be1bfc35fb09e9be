"""Anthropic's own client with a real server, sync and asyncio, whole and streamed.

The demo model is small: the request forces the call.
"""

import anthropic
import pytest
from pydantic import BaseModel

TOOL = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
ASK = {
    "model": "demo",
    "max_tokens": 60,
    "system": "Answer briefly.",
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "extra_body": {"temperature": 0},
}


class Person(BaseModel, extra="forbid"):
    name: str
    age: int


@pytest.fixture
def client(served):
    with anthropic.Anthropic(base_url=served.http, api_key="none", max_retries=0) as client:
        yield client


def test_a_conversation_with_a_call(client):
    first = client.messages.create(**ASK, tools=[TOOL], tool_choice={"type": "any"})
    call = first.content[-1]
    assert first.stop_reason == "tool_use"
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "22 degrees"}
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    asked = {**ASK, "messages": messages, "tools": [TOOL]}
    second = client.messages.create(**asked)
    assert second.content[0].text
    used = second.usage
    assert used.cache_read_input_tokens > 0
    counted = client.messages.count_tokens(
        **{name: asked[name] for name in ("model", "system", "messages", "tools")}
    )
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_a_stream_is_the_whole_answer(client):
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == (
        whole.stop_reason,
        whole.usage.output_tokens,
    )


def test_a_schema(client):
    question = [{"role": "user", "content": "Bob is 5 years old."}]
    asked = {"model": "demo", "max_tokens": 300, "messages": question}
    parsed = client.messages.parse(**asked, output_format=Person).parsed_output
    assert isinstance(parsed, Person)


async def test_asyncio(served):
    async with anthropic.AsyncAnthropic(base_url=served.http, auth_token="none") as client:
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            assert await stream.get_final_text() == whole.content[0].text
        assert (
            await client.messages.count_tokens(model="demo", messages=ASK["messages"])
        ).input_tokens
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**{**ASK, "model": "other"})
