"""Unknown members from clients change nothing, and fail no request."""

import json

import pytest

MESSAGE = (
    "cache_control", "id", "metadata", "provider_specific_fields", "thinking_blocks", "annotations",
    "reasoning_details", "weight", "created_at", "additional_kwargs", "response_metadata", "parsed",
    "usage", "type", "status", "model",
)  # fmt: skip
PART = ("cache_control", "id", "annotations", "citations", "index", "metadata", "citation")
CALL = ("index", "cache_control", "provider_specific_fields", "extra_content", "status")
CALLED = ("parsed_arguments", "thought_signature", "output")
RESULT = ("is_error", "cache_control", "artifact", "status", "tool_use_id")
TOOL = ("cache_control", "metadata", "defer_loading", "eager_input_streaming")
FUNCTION = ("cache_control", "examples", "returns", "type")
STREAM = ("include_metadata", "chunk_size")
VALUES = (None, {}, [], True, "ephemeral", {"type": "ephemeral"}, [{"a": 1}], 5)
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {}}}


def with_members(names, value):
    return {} if value == "none" else dict.fromkeys(names, value)


def body(value="none"):
    """Return a conversation with a call; all its parts have an extra member with a value."""

    def add(names):
        return with_members(names, value)

    call = {"name": "weather", "arguments": "{}", **add(CALLED)}
    return {
        "model": "tiny",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi", **add(PART)}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": call, **add(CALL)}],
                **add(MESSAGE),
            },
            {"role": "tool", "tool_call_id": "c", "content": "warm", **add(RESULT)},
            {"role": "user", "content": "hi", **add(MESSAGE)},
        ],
        "tools": [{"type": "function", "function": {**WEATHER, **add(FUNCTION)}, **add(TOOL)}],
    }


@pytest.fixture
def talking(scripted):
    return scripted("a", eos=True, max_model_len=4096, features={"constraints": True})


async def test_members_of_parts_change_no_token(frontend, talking, post):
    async with frontend(talking) as (app, _):
        chat, tokenize = f"{app.url}/v1/chat/completions", f"{app.url}/tokenize"
        plain = json.loads((await post(tokenize, json.dumps(body()).encode())).body)
        for value in VALUES:
            asked = body(value)
            found = await post(tokenize, json.dumps(asked).encode())
            assert (found.status, json.loads(found.body)) == (200, plain), value
            asked |= {"stream_options": with_members(STREAM, value)}
            answer = await post(chat, json.dumps(asked).encode())
            assert answer.status == 200, answer.body
            assert json.loads(answer.body)["usage"]["prompt_tokens"] == plain["count"]
            assert "x-ignored-arguments" not in answer.headers
        await app.clean()


async def test_members_of_a_schema_change_nothing(frontend, talking, post):
    schema = {"name": "x", "schema": {"type": "object"}, "id": "y", "cache_control": None}
    form = {"type": "json_schema", "json_schema": schema, "title": "z"}
    async with frontend(talking) as (app, _):
        asked = json.dumps(body() | {"tools": [], "response_format": form}).encode()
        answer = await post(f"{app.url}/v1/chat/completions", asked)
    assert answer.status == 200


async def test_arguments_that_nobody_knows_are_named_in_a_header(frontend, talking, post):
    unknown = {"best_off": 1, "ünknown\r\nX-Evil": 2, "x" * 300: None}
    async with frontend(talking) as (app, _):
        for path, asked in (
            ("v1/chat/completions", body()),
            ("v1/chat/completions", body() | {"stream": True}),
            ("v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1}),
            ("tokenize", {"prompt": "x"}),
            ("detokenize", {"tokens": [5]}),
        ):
            answer = await post(f"{app.url}/{path}", json.dumps(asked | unknown).encode())
            assert answer.status == 200
            named = answer.headers["x-ignored-arguments"]
            assert named == f"best_off, {'x' * 60}, %C3%BCnknown%0D%0AX-Evil"
            assert "x-evil" not in answer.headers
        many = {f"unknown-{i}": 0 for i in range(1000)}
        answer = await post(f"{app.url}/tokenize", json.dumps({"prompt": "x"} | many).encode())
        assert len(answer.headers["x-ignored-arguments"]) < 400


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
async def test_reasoning_effort_is_a_variable_of_the_template(frontend, talking, post, effort):
    async with frontend(talking) as (app, _):
        texts = []
        for way in (
            {"reasoning_effort": effort},
            {"reasoning": {"effort": effort, "summary": "auto"}},
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": effort}},
            {},
        ):
            answer = await post(f"{app.url}/tokenize", json.dumps(body() | way).encode())
            assert answer.status == 200, answer.body
            texts.append(json.loads(answer.body)["tokens"])
    assert texts[0] == texts[1] == texts[2] != texts[3]
