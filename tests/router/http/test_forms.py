"""Output constraints, by OpenAI's and vLLM's names, as the engine receives them."""

import asyncio
import json

import openai
import pydantic
import pytest

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
FORMAT = {"name": "it", "schema": SCHEMA}


def json_schema(**more) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {**FORMAT, **more}}}


FORMS = [
    ({"response_format": {"type": "text"}}, None, None),
    ({"response_format": {"type": "json_object"}}, "json_object", True),
    (json_schema(), "json_schema", SCHEMA),
    (json_schema(strict=True, description="x"), "json_schema", SCHEMA),
    (json_schema(strict=False), "json_schema", SCHEMA),
    (json_schema(strict=None), "json_schema", SCHEMA),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"guided_choice": ["a", "b"]}, "choices", ["a", "b"]),
    ({"guided_grammar": 'start: "a"'}, "grammar", 'start: "a"'),
    ({"guided_json": SCHEMA, "guided_decoding_backend": "guidance"}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json_object": True}}, "json_object", True),
    ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a"]}}, "choices", ["a"]),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
    ({"structured_outputs": {}}, None, None),
    ({"structured_outputs": {"json_object": False}, "guided_json": None}, None, None),
]


@pytest.fixture
def constraining(scripted):
    """Creates an engine that accepts constraints but answers regardless of them."""
    return lambda text="{}": scripted(text, eos=True, features={"constraints": True})


def plain(constraint) -> tuple[str | None, object]:
    kind = constraint.WhichOneof("kind")
    if kind is None:
        return None, None
    value = getattr(constraint, kind)
    if kind == "json_schema":
        return kind, json.loads(value)
    return kind, list(value.values) if kind == "choices" else value


async def test_forms_reach_the_engine(frontend, constraining, hello):
    engine = constraining()
    async with frontend(engine) as (_, client):
        for arguments, kind, value in FORMS:
            await client.chat.completions.create(**hello, extra_body=arguments)
            await client.completions.create(model="tiny", prompt="x", extra_body=arguments)
            for submit in engine.submits[-2:]:
                assert plain(submit.constraint) == (kind, value), arguments


WRONG = [
    ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format.type"),
    ({"response_format": {"type": "grammar", "grammar": "x"}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "text", "json_schema": FORMAT}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": ""}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"xml": "x"}}, "structured_outputs.xml"),
    ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ({"guided_json": {}, "guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
]


async def test_what_is_wrong_is_named(frontend, constraining, hello):
    engine = constraining()
    async with frontend(engine) as (_, client):
        for arguments, param in WRONG:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**hello, extra_body=arguments)
            assert caught.value.param == param, arguments
    assert not engine.submits


async def test_an_engine_without_constraints_refuses_them(frontend, scripted, hello):
    async with frontend(scripted("a")) as (_, client):
        for arguments, param in [
            (json_schema(), "response_format.json_schema.schema"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"guided_choice": ["a"]}, "guided_choice"),
        ]:
            with pytest.raises(openai.BadRequestError, match="cannot constrain") as caught:
                await client.chat.completions.create(**hello, extra_body=arguments)
            assert (caught.value.param, caught.value.code) == (param, "unsupported_parameter")


async def test_the_engine_s_words_about_a_schema_name_the_argument(frontend, scripted, hello):
    engine = scripted(interval=None, features={"constraints": True})
    async with frontend(engine) as (app, client):

        async def refuse() -> None:
            await app.until(lambda: engine.submits)
            failure = {
                "request_id": engine.submits[-1].request_id,
                "code": 3,
                "message": "constraint.json_schema is not supported: 'not'",
                "field": "constraint.json_schema",
            }
            engine.send(failures=[failure])

        task = asyncio.create_task(refuse())
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**hello, extra_body={"guided_json": {}})
        await task
    assert caught.value.param == "guided_json"
    assert "guided_json is not supported: 'not'" in str(caught.value)


class Sum(pydantic.BaseModel):
    total: int


async def test_openai_s_parse(frontend, constraining, hello):
    engine = constraining('{"total": 5}')
    async with frontend(engine) as (_, client):
        answer = await client.chat.completions.parse(**hello, response_format=Sum)
        assert answer.choices[0].message.parsed == Sum(total=5)
        async with client.chat.completions.stream(**hello, response_format=Sum) as stream:
            kinds = {event.type async for event in stream}
            whole = await stream.get_final_completion()
        assert whole.choices[0].message.parsed == Sum(total=5)
        assert {"content.delta", "content.done"} <= kinds
        # Sent back unchanged, the message is accepted.
        messages = [*hello["messages"], answer.choices[0].message]
        await client.chat.completions.create(model="tiny", messages=messages)
    kind, schema = plain(engine.submits[0].constraint)
    assert (kind, schema["required"]) == ("json_schema", ["total"])
