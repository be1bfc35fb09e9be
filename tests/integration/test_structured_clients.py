"""Clients of OpenAI's API use schemas and tools with a real server, whole and streamed.

The demo model is small: where it would not choose a tool, the request forces the call.
"""

import json
import re
from typing import Literal

import grpc
import instructor
import jsonschema
import openai
import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

import octavo
from octavo.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
SETTINGS = {"model": "demo", "temperature": 0, "max_tokens": 100}


class Weather(BaseModel, extra="forbid"):
    """Return the weather in a city."""

    city: Literal["Paris", "Rome"]
    unit: Literal["celsius", "kelvin"] = Field(description="Unit of the temperature")


TOOL = openai.pydantic_function_tool(Weather, name="get_weather", description="Weather of a city")
NAMED = {"type": "function", "function": {"name": "get_weather"}}


CHOICES = ["yes", "no", "perhaps. (a/b) ü"]


def is_weather(text: str) -> bool:
    return bool(Weather.model_validate_json(text))


KINDS = [
    ({"json_schema": json.dumps(Weather.model_json_schema())}, is_weather),
    ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
    ({"regex": "[0-9]{3}-[a-z]{2,5}"}, re.compile("[0-9]{3}-[a-z]{2,5}").fullmatch),
    ({"grammar": 'start: "<" pair{2} ">"\npair: /[xy]/ " "'}, re.compile("<([xy] ){2}>").fullmatch),
    ({"choices": {"values": CHOICES}}, CHOICES.__contains__),
]


@pytest.fixture(scope="module")
def service(served):
    with grpc.insecure_channel(served.address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


@pytest.mark.parametrize(
    ("constraint", "keeps"), KINDS, ids=[next(iter(kind)) for kind, _ in KINDS]
)
def test_each_kind_of_constraint_over_grpc(service, constraint, keeps):
    request = generation_pb2.GenerateRequest(
        text="Answer: ",
        constraint=constraint,
        sampling=sampling_pb2.SamplingParams(temperature=1.5, n=3, seed=1),
        stop=sampling_pb2.StopConditions(max_tokens=200),
    )
    texts, ended = ["", "", ""], []
    for response in service.Generate(request):
        texts[response.delta.index] += response.delta.text
        if response.HasField("finished"):
            ended.append((response.finished.index, response.finished.reason))
    finished = [index for index, reason in ended if reason == sampling_pb2.FINISH_REASON_EOS]
    assert len(ended) == len(texts)
    assert finished
    assert all(keeps(texts[index]) for index in finished)


@pytest.fixture(scope="module")
def client(served):
    with openai.OpenAI(base_url=f"{served.http}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def langchain(served):
    return ChatOpenAI(
        base_url=f"{served.http}/v1", api_key="none", max_retries=0, max_completion_tokens=100,
        model="demo", temperature=0,
    )  # fmt: skip


def test_the_loop_of_tool_calls(client):
    """The loop of OpenAI's guide: call, run, return the result, answer."""
    messages = list(QUESTION)
    asked = client.chat.completions.create(
        messages=messages, tools=[TOOL], tool_choice="required", **SETTINGS
    ).choices[0]
    assert asked.finish_reason == "tool_calls"
    assert asked.message.content is None
    messages.append(asked.message)
    for call in asked.message.tool_calls:
        assert call.function.name == "get_weather"
        weather = Weather.model_validate_json(call.function.arguments)
        result = f"22 degrees {weather.unit} in {weather.city}"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answer = client.chat.completions.create(
        messages=messages, tools=[TOOL], tool_choice="none", **SETTINGS
    ).choices[0]
    assert answer.finish_reason in {"stop", "length"}
    assert answer.message.tool_calls is None
    assert "22" in answer.message.content


def test_a_streamed_call_is_the_whole_one(client):
    arguments = {"messages": QUESTION, "tools": [TOOL], "tool_choice": NAMED, **SETTINGS}
    whole = client.chat.completions.create(**arguments).choices[0]
    first, *rest = client.chat.completions.create(stream=True, **arguments)
    assert first.choices[0].delta.role == "assistant"
    pieces = [c for chunk in rest for c in chunk.choices[0].delta.tool_calls or ()]
    assert {piece.index for piece in pieces} == {0}
    assert [(p.type, p.function.name) for p in pieces if p.id] == [("function", "get_weather")]
    (call,) = whole.message.tool_calls
    assert "".join(p.function.arguments for p in pieces) == call.function.arguments
    assert len(pieces) > 3, "the arguments come as they are made"
    assert rest[-1].choices[0].finish_reason == whole.finish_reason == "tool_calls"


def test_openai_s_helpers(client):
    arguments = {"messages": QUESTION, **SETTINGS}
    parsed = client.chat.completions.parse(response_format=Weather, **arguments).choices[0]
    assert isinstance(parsed.message.parsed, Weather)
    tools = {"tools": [TOOL], "tool_choice": NAMED}
    called = client.chat.completions.parse(**tools, **arguments).choices[0]
    assert isinstance(called.message.tool_calls[0].function.parsed_arguments, Weather)
    with client.chat.completions.stream(response_format=Weather, **arguments) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == parsed.message.parsed
    assert {"content.delta", "content.done"} <= kinds
    with client.chat.completions.stream(**tools, **arguments) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments == called.message.tool_calls[0].function.parsed_arguments
    kind = "tool_calls.function.arguments"
    assert {f"{kind}.delta", f"{kind}.done"} <= kinds
    # The helpers' result is a message of the next request.
    messages = [*QUESTION, called.message]
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    client.chat.completions.create(messages=[*messages, parsed.message, *QUESTION], **SETTINGS)


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_instructor(client, mode):
    patched = instructor.from_openai(client, mode=mode)
    arguments = {"messages": QUESTION, "response_model": Weather, "max_retries": 0, **SETTINGS}
    assert isinstance(patched.chat.completions.create(**arguments), Weather)
    *_, last = patched.chat.completions.create_partial(**arguments)
    assert last.city in {"Paris", "Rome"}
    assert last.unit in {"celsius", "kelvin"}


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_s_structured_output(langchain, method):
    model = langchain.with_structured_output(Weather, method=method)
    assert isinstance(model.invoke("What is the weather in Paris?"), Weather)
    *_, last = model.stream("What is the weather in Paris?")
    assert isinstance(last, Weather)


def test_langchain_s_tools(langchain):
    @tool
    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """Weather of a city."""
        return f"22 degrees in {city}"

    model = langchain.bind_tools([get_weather], tool_choice="get_weather")
    question = HumanMessage("What is the weather in Paris?")
    answer = model.invoke([question])
    (call,) = answer.tool_calls
    streamed = None
    for chunk in model.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert [(c["name"], c["args"]) for c in streamed.tool_calls] == [(call["name"], call["args"])]
    result = get_weather.invoke(call)
    assert isinstance(result, ToolMessage)
    told = langchain.bind_tools([get_weather], tool_choice="none").invoke(
        [question, answer, result]
    )
    assert "22" in told.content


def test_the_python_client(served):
    with octavo.Client(served.address) as client:
        options = {"max_tokens": 100, "temperature": 0}
        assert isinstance(client.complete(QUESTION, schema=Weather, **options), Weather)
        weather = octavo.Tool("get_weather", "Weather of a city", Weather)
        called = client.complete(
            QUESTION, tools=[weather], tool_choice=weather, parallel_tool_calls=False, **options
        )
        assert called.outputs[0].reason == octavo.FinishReason.TOOL_CALLS
        (call,) = called.tool_calls
        jsonschema.validate(call.parse(), Weather.model_json_schema())
        result = octavo.Message("tool", "22 degrees", tool_call_id=call.id)
        answer = client.complete(
            [*QUESTION, called.message, result], tools=[weather], tool_choice="none", **options
        )
        assert "22" in answer.text
