"""Answers for schemas that cannot be fully enforced; the engine's text is scripted."""

import json

import openai
import pytest

TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
SET = {"type": "object", "properties": {"tags": TAGS}, "required": ["tags"]}
TWICE = '{"tags": ["a", "a"]}'
ERROR = 'content#/tags: ["a","a"] has non-unique elements'
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SET}}
STRICT = {"type": "json_schema", "json_schema": {**FORMAT["json_schema"], "strict": True}}
TOOL = {"type": "function", "function": {"name": "label", "parameters": SET}}
CALL = f'<tool_call>\n{{"name": "label", "arguments": {TWICE}}}\n</tool_call>'
HEADER = "x-unenforced-schema"
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "none"}
FORMS = [
    ({"response_format": FORMAT}, "response_format.json_schema.schema"),
    ({"guided_json": SET}, "guided_json"),
    ({"structured_outputs": {"json": json.dumps(SET)}}, "structured_outputs.json"),
]


@pytest.fixture
def talking(scripted):
    return lambda text, **options: scripted(
        text, eos=True, max_model_len=4096, features={"constraints": True}, **options
    )


async def whole(client, **arguments):
    """Return an answer's header, and its body."""
    got = await client.chat.completions.with_raw_response.create(**arguments)
    return got.headers.get(HEADER), json.loads(got.content)


@pytest.mark.parametrize(("form", "field"), FORMS, ids=[next(iter(form)) for form, _ in FORMS])
async def test_a_form(frontend, talking, hello, form, field):
    engine = talking(TWICE)
    place = f"{field}#/properties/tags/uniqueItems"
    async with frontend(engine, **PARSERS) as (_, client):
        header, body = await whole(client, **hello, extra_body=form)
        stream = await client.chat.completions.with_raw_response.create(
            **hello, extra_body=form, stream=True
        )
        lines = [line async for line in stream.http_response.aiter_lines()]
        text = await client.completions.create(model="tiny", prompt="x", extra_body=form)
    assert header == stream.headers[HEADER] == place
    assert body["unenforced_schema"] == [place]
    assert body["choices"][0]["schema_errors"] == [ERROR]
    assert text.choices[0].schema_errors == [ERROR]
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [chunk.get("unenforced_schema") for chunk in chunks[:2]] == [[place], None]
    *others, last = [chunk["choices"][0] for chunk in chunks]
    assert last["schema_errors"] == [ERROR]
    assert not any("schema_errors" in choice for choice in others)
    sent = json.loads(engine.submits[0].constraint.json_schema)
    assert sent["properties"]["tags"] == {"type": "array", "items": {"type": "string"}}
    assert not engine.submits[0].constraint.lenient


async def test_nothing_is_said_where_all_is_enforced_or_kept(frontend, talking, hello):
    async with frontend(talking('{"tags": ["a"]}'), **PARSERS) as (_, client):
        header, body = await whole(client, **hello, response_format=FORMAT)
        assert header is not None
        assert "schema_errors" not in body["choices"][0]
        for more in [{"response_format": {"type": "json_object"}}, {"tools": [TOOL]}]:
            header, body = await whole(client, **hello, **more)
            assert header is None
            assert "unenforced_schema" not in body


async def test_what_is_strict_reaches_the_engine_as_it_is(frontend, talking, hello):
    engine = talking(TWICE)
    async with frontend(engine, **PARSERS) as (_, client):
        header, body = await whole(client, **hello, response_format=STRICT)
    assert header is None
    assert "schema_errors" not in body["choices"][0]
    assert json.loads(engine.submits[0].constraint.json_schema) == SET


async def test_an_output_that_was_cut_is_not_checked(frontend, scripted, talking, hello):
    cut = scripted(TWICE, max_model_len=4096, features={"constraints": True})
    for engine, stop, reason in [(cut, None, "length"), (talking(TWICE), '"a"]', "stop")]:
        async with frontend(engine, **PARSERS) as (_, client):
            _, body = await whole(client, **hello, response_format=FORMAT, stop=stop)
            assert body["choices"][0]["finish_reason"] == reason
            assert "schema_errors" not in body["choices"][0]


@pytest.mark.parametrize("choice", ["required", "named"])
async def test_a_tool_that_must_be_called(frontend, talking, hello, choice):
    named = {"type": "function", "function": {"name": "label"}}
    tool_choice = named if choice == "named" else choice
    async with frontend(talking(CALL), **PARSERS) as (_, client):
        header, body = await whole(client, **hello, tools=[TOOL], tool_choice=tool_choice)
    (got,) = body["choices"]
    assert header == "tools[0].function.parameters#/properties/tags/uniqueItems"
    assert got["schema_errors"] == [f"tool_calls[0].arguments{ERROR.removeprefix('content')}"]
    assert got["finish_reason"] == "tool_calls"
    assert json.loads(got["message"]["tool_calls"][0]["function"]["arguments"]) == json.loads(TWICE)


async def test_what_no_validator_takes_is_refused(frontend, talking, hello):
    engine = talking(TWICE)
    wrong = {"type": 5, "uniqueItems": True}
    async with frontend(engine, **PARSERS) as (_, client):
        with pytest.raises(openai.BadRequestError, match="#/type") as caught:
            await client.chat.completions.create(**hello, extra_body={"guided_json": wrong})
    assert caught.value.param == "guided_json"
    assert not engine.submits


async def test_a_long_header_is_cut_and_is_ascii(frontend, talking, hello):
    schema = {"properties": {f"größe,{i}\n": TAGS for i in range(99)}}
    async with frontend(talking("{}"), **PARSERS) as (_, client):
        header, body = await whole(client, **hello, extra_body={"guided_json": schema})
    assert header.isascii()
    assert len(header) < 1_100
    assert header.endswith(", ...")
    assert len(body["unenforced_schema"]) == 64
    assert body["unenforced_schema"][0] == "guided_json#/properties/größe,0\n/uniqueItems"
