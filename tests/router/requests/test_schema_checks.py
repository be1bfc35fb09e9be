"""What grammars cannot enforce is checked at an output's end, in a safe child process."""

import json

import pytest
import uvloop

from octavo.common.rpc import RpcError
from octavo.router.requests.held_schemas import HeldSchemas, held_schemas
from octavo.router.requests.schema_checker import SchemaChecker
from octavo.v1 import generation_pb2
from octavo.v1.generation_pb2 import ToolChoiceMode

TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
SET = {"type": "object", "properties": {"tags": TAGS}, "required": ["tags"]}


@pytest.fixture
async def checker():
    checker = SchemaChecker()
    yield checker
    await checker.close()


async def errors(checker, schema, text) -> list[str]:
    return await checker.errors({"content": (json.dumps(schema), text)})


async def refusal(checker, schema) -> str:
    with pytest.raises(RpcError) as caught:
        await checker.check_schemas(HeldSchemas(fields={"f": json.dumps(schema)}))
    assert caught.value.field == "f"
    return caught.value.message


async def test_errors_have_places(checker):
    assert await errors(checker, SET, '{"tags": ["a", "b"]}') == []
    assert await errors(checker, SET, '{"tags": ["a", "a"]}') == [
        'content#/tags: ["a","a"] has non-unique elements'
    ]
    (error,) = await errors(checker, SET, '{"tags": ')
    assert error.startswith("content#: it is not JSON: ")
    assert await errors(checker, SET, r'{"tags": ["\ud800"]}') == []
    assert len(await errors(checker, SET, r'{"tags": ["\ud800", "\ud800"]}')) == 1
    encoded = {"type": "string", "format": "base64"}
    assert await errors(checker, encoded, '"QUI="') == []
    assert await errors(checker, encoded, '"QUI"') == ['content#: "QUI" is not a "base64"']


def test_it_runs_in_the_router_s_loop():
    async def check() -> list[str]:
        checker = SchemaChecker()
        try:
            return await errors(checker, SET, '{"tags": 1}')
        finally:
            await checker.close()

    assert uvloop.run(check()) == ['content#/tags: 1 is not of type "array"']


async def test_errors_are_few_and_short(checker):
    found = await errors(checker, {"items": {"not": {}}}, json.dumps(["a" * 1_000] * 20))
    assert len(found) == 8
    assert max(map(len, found)) < 300


async def test_schemas_that_are_none(checker):
    assert "#/type: 5" in await refusal(checker, {"type": 5})
    assert "not followed" in await refusal(checker, {"$ref": "http://127.0.0.1:9/x"})
    assert "Unknown meta-schema" in await refusal(checker, {"$schema": "file:///etc/passwd"})
    assert await refusal(checker, {"$ref": "#/none"})


def chain(keyword, length=40):
    """Return a schema of exponential size: each definition refers to the next one twice."""
    each = {f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**each, f"a{length}": {"type": "string"}}}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("schema", "document"),
    [
        (chain("anyOf"), 1),
        (chain("allOf"), "a"),
        ({"not": {"$ref": "#"}}, 1),
        ({"allOf": [{"$ref": "#"}, {"not": {"$ref": "#"}}]}, 1),
        ({"pattern": r"^(?=(a+)+$)b|(a+)+\1\2$"}, "a" * 40 + "!"),
        ({"items": {"$ref": "#"}, "not": {"items": {"items": {"$ref": "#"}}}}, [[[[[]]]]]),
    ],
    ids=range(6),
)
async def test_no_schema_stops_the_others_checks(checker, schema, document):
    for text in [None, json.dumps(document)]:
        await checker._ask(json.dumps(schema), text)
    assert await errors(checker, SET, '{"tags": []}') == []


def request(*, lenient=False, mode=ToolChoiceMode.TOOL_CHOICE_MODE_AUTO, tools=(), schema=None):
    message = generation_pb2.GenerateRequest()
    message.chat.messages.add(role="user", content="?")
    message.chat.tool_choice.mode = mode
    for name, strict, parameters in tools:
        message.chat.tools.add(name=name, strict=strict, parameters=json.dumps(parameters))
    if schema is not None:
        message.constraint.json_schema = json.dumps(schema)
        message.constraint.lenient = lenient
    return message


def test_content_is_lenient_where_it_is_asked_for():
    assert held_schemas(request(schema=SET)).checks is None
    assert held_schemas(request(schema=SET)).content is None
    held = held_schemas(request(schema=SET, lenient=True))
    assert held.checks.unenforced == ["constraint.json_schema#/properties/tags/uniqueItems"]
    assert held.checks.checked_content == json.dumps(SET)
    assert "uniqueItems" not in held.content["properties"]["tags"]


def test_places_can_be_said_in_utf_8():
    schema = {"properties": {"\ud800": TAGS}}
    (place,) = held_schemas(request(schema=schema, lenient=True)).checks.unenforced
    assert place == "constraint.json_schema#/properties/?/uniqueItems"


def test_what_is_said_otherwise_is_said_to_the_grammar_however_strict():
    union = {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}], "$defs": {"a": {"type": "string"}}}
    held = held_schemas(request(schema=union))
    assert "anyOf" in held.content
    assert held.checks is None


@pytest.mark.parametrize("strict", [False, True])
def test_tools_that_must_be_called_are_lenient_unless_they_are_strict(strict):
    required = ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED
    tools = [("plain", strict, {"type": "object"}), ("set", strict, SET)]
    held = held_schemas(request(mode=required, tools=tools))
    assert [tool.strict for tool in held.tools] == [True, True]
    assert held.tools[1].schema["additionalProperties"] is False
    if strict:
        assert held.checks is None
        assert held.tools[1].schema["properties"]["tags"] == TAGS
        return
    assert held.checks.unenforced == ["chat.tools[1].parameters#/properties/tags/uniqueItems"]
    assert held.checks.checked_arguments == {"set": json.dumps(SET)}
    free = held_schemas(request(tools=tools))
    assert free.checks is None, "they are not held to it"
