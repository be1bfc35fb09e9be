"""Schemas, tools and reasoning in both clients, against a scripted service."""

import json

import pydantic
import pytest

import octavo
from octavo.client.requests import generate_request, tokenize_request
from octavo.v1 import generation_pb2 as pb
from octavo.v1 import sampling_pb2


class City(pydantic.BaseModel):
    name: str
    people: int


WEATHER = octavo.Tool("weather", "Weather of a city", City)
CALLING = [
    pb.Delta(reasoning="Paris "),
    pb.Delta(reasoning="it is.", text="Wait."),
    pb.Delta(tool_calls=[pb.ToolCallDelta(id="a", name="weather", arguments='{"name"')]),
    pb.Delta(
        tool_calls=[
            pb.ToolCallDelta(arguments=': "Paris"}'),
            pb.ToolCallDelta(index=1, id="b", name="time", arguments="{}"),
        ]
    ),
]


@pytest.fixture
def client(service):
    with octavo.Client(service.address) as client:
        yield client


def test_a_schema_makes_an_instance(service, client):
    service.deltas = [pb.Delta(text='{"name": "Paris", '), pb.Delta(text='"people": 2}')]
    city = client.complete("x", schema=City, max_tokens=9)
    assert city == City(name="Paris", people=2)
    (request,) = service.requests
    assert json.loads(request.constraint.json_schema) == City.model_json_schema()
    assert request.stop.max_tokens == 9
    assert client.complete("a b").text == '{"name": "Paris", "people": 2}'
    service.deltas = [pb.Delta(text="[1, 2]")]
    assert client.complete("x", schema=list[int]) == [1, 2]
    assert json.loads(service.requests[-1].constraint.json_schema)["type"] == "array"


def test_a_cut_output_is_no_instance(service, client):
    service.deltas = [pb.Delta(text='{"name": "Par')]
    service.reason = sampling_pb2.FINISH_REASON_LENGTH
    with pytest.raises(octavo.OutputError, match="ended by length, does not fit") as caught:
        client.complete("x", schema=City)
    assert caught.value.completion.text == '{"name": "Par'
    assert isinstance(caught.value, octavo.Error)


async def test_asyncio_has_schemas_too(service):
    service.deltas = [pb.Delta(text='{"name": "Paris", "people": 2}')]
    async with octavo.AsyncClient(service.address) as client:
        assert await client.complete("x", schema=City) == City(name="Paris", people=2)
        assert (await client.complete("x")).text == service.deltas[0].text
        service.deltas = [pb.Delta(text="{")]
        with pytest.raises(octavo.OutputError):
            await client.complete("x", schema=City)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"n": 2}, "sampling.n"), ({"json_schema": {}}, "constraint.json_schema")],
)
def test_what_excludes_a_schema(client, options, field):
    with pytest.raises(octavo.InvalidArgumentError) as caught:
        client.complete("x", schema=City, **options)
    assert caught.value.violations[0].field == field


def test_calls_and_reasoning_come_in_pieces_and_whole(service, client):
    service.deltas = CALLING
    service.reason = sampling_pb2.FINISH_REASON_TOOL_CALLS
    first, second, third, fourth = client.generate("x")
    assert (first.reasoning, first.text) == ("Paris ", "")
    assert (second.reasoning, second.text) == ("it is.", "Wait.")
    assert third.tool_calls == (octavo.ToolCallDelta(0, '{"name"', "a", "weather"),)
    assert [piece.index for piece in fourth.tool_calls] == [0, 1]
    completion = client.complete([octavo.Message("user", "x")], tools=[WEATHER])
    calls = (
        octavo.ToolCall("a", "weather", '{"name": "Paris"}'),
        octavo.ToolCall("b", "time", "{}"),
    )
    assert completion.tool_calls == calls
    assert completion.tool_calls[0].parse() == {"name": "Paris"}
    assert (completion.text, completion.reasoning) == ("Wait.", "Paris it is.")
    assert completion.outputs[0].reason == octavo.FinishReason.TOOL_CALLS
    assert completion.message == octavo.Message(
        "assistant", "Wait.", tool_calls=calls, reasoning="Paris it is."
    )


def test_an_answer_is_a_message_of_the_next_prompt(service, client):
    service.deltas = CALLING
    answer = client.complete([octavo.Message("user", "x")]).message
    result = octavo.Message("tool", "sunny", tool_call_id="a", name="weather")
    client.complete([octavo.Message("user", "x"), answer, result])
    _, sent, returned = service.requests[-1].chat.messages
    assert (sent.role, sent.content, sent.reasoning) == ("assistant", "Wait.", "Paris it is.")
    assert [(c.id, c.name, c.arguments) for c in sent.tool_calls] == [
        ("a", "weather", '{"name": "Paris"}'),
        ("b", "time", "{}"),
    ]
    assert (returned.tool_call_id, returned.name, returned.content) == ("a", "weather", "sunny")


def test_tools_of_all_forms():
    function = {"name": "time", "parameters": {"type": "object"}, "description": None}
    tools = [WEATHER, function, {"type": "function", "function": {**function, "strict": True}}]
    for chat in (
        generate_request([octavo.Message("user", "x")], {"tools": tools}).chat,
        tokenize_request([octavo.Message("user", "x")], None, {"tools": tools}).chat,
    ):
        weather, plain, wrapped = chat.tools
        assert (weather.name, weather.description) == ("weather", "Weather of a city")
        assert json.loads(weather.parameters) == City.model_json_schema()
        assert (plain.name, json.loads(plain.parameters)) == ("time", {"type": "object"})
        assert (plain.strict, wrapped.strict) == (False, True)
        assert wrapped.parameters == plain.parameters


@pytest.mark.parametrize(
    ("choice", "kind", "value"),
    [
        ("auto", "mode", pb.TOOL_CHOICE_MODE_AUTO),
        ("none", "mode", pb.TOOL_CHOICE_MODE_NONE),
        ("required", "mode", pb.TOOL_CHOICE_MODE_REQUIRED),
        ("weather", "name", "weather"),
        (WEATHER, "name", "weather"),
        (octavo.Tool("auto"), "name", "auto"),
    ],
)
def test_tool_choices(choice, kind, value):
    request = generate_request([octavo.Message("user", "x")], {"tool_choice": choice})
    assert request.chat.tool_choice.WhichOneof("kind") == kind
    assert getattr(request.chat.tool_choice, kind) == value


def test_messages_in_openai_s_form():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, "two"]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
    ]
    user, assistant, tool = generate_request(messages, {}).chat.messages
    assert (user.content, [part.text for part in user.parts]) == ("", ["one", "two"])
    assert (assistant.content, assistant.reasoning) == ("", "hm")
    assert [(c.id, c.name, c.arguments) for c in assistant.tool_calls] == [("a", "f", "{}")]
    assert tool.tool_call_id == "a"


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": 5},
        {"role": "user", "contents": "x"},
        {"role": "assistant", "tool_calls": [{"id": "a"}]},
        {"content": "x"},
    ],
)
def test_what_is_no_message(wrong):
    with pytest.raises(TypeError, match="item 1"):
        generate_request([octavo.Message("user", "x"), wrong], {})


@pytest.mark.parametrize("wrong", [{"type": "web_search"}, {"name": "f", "code": 1}, 5])
def test_what_is_no_tool(wrong):
    with pytest.raises(TypeError, match="item 0"):
        generate_request([octavo.Message("user", "x")], {"tools": [wrong]})


def test_tools_need_a_chat():
    with pytest.raises(octavo.InvalidArgumentError, match="needs a prompt of messages"):
        generate_request("text", {"tools": [WEATHER]})


@pytest.mark.parametrize(
    ("options", "kind", "value"),
    [
        ({"json_schema": '{"a": 1}'}, "json_schema", '{"a": 1}'),
        ({"json_schema": {"title": "é"}}, "json_schema", '{"title": "é"}'),
        ({"json_schema": {}}, "json_schema", "{}"),
        ({"json_object": True}, "json_object", True),
        ({"json_object": False}, None, None),
        ({"regex": "a+"}, "regex", "a+"),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"choices": ["a", "b"]}, "choices", pb.GenerateRequest().constraint.choices),
        ({"choices": []}, "choices", pb.GenerateRequest().constraint.choices),
    ],
)
def test_constraints(options, kind, value):
    constraint = generate_request("x", options).constraint
    assert constraint.WhichOneof("kind") == kind
    if kind == "choices":
        assert list(constraint.choices.values) == options["choices"]
    elif kind is not None:
        assert getattr(constraint, kind) == value


def test_an_output_has_one_constraint():
    with pytest.raises(
        octavo.InvalidArgumentError, match="regex and json_object exclude"
    ) as caught:
        generate_request("x", {"json_object": True, "regex": "a"})
    assert caught.value.violations[0].field == "constraint.regex"


@pytest.mark.parametrize("schema", [{"a": float("nan")}, {"a": object()}])
def test_a_schema_that_is_no_json(schema):
    with pytest.raises(octavo.InvalidArgumentError) as caught:
        generate_request("x", {"json_schema": schema})
    assert caught.value.violations[0].field == "constraint.json_schema"
