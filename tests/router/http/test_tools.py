"""Tools and reasoning in OpenAI's form; the engine's text is scripted, in Hermes' format."""

import json

import openai
import pytest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
REASONED = len("so\n") + len("</think>") - 1
"""Tokens of `<think>so\\n</think>` that are reasoning: one per byte, without the last."""
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}


@pytest.fixture
def talking(scripted):
    return lambda text, **options: scripted(
        text, eos=True, max_model_len=4096, features={"constraints": True}, **options
    )


async def test_a_call_whole(frontend, talking, hello):
    async with frontend(talking("Let me see." + CALL + CALL), **PARSERS) as (_, client):
        (choice,) = (await client.chat.completions.create(**hello, tools=TOOLS)).choices
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name) == ("function", "weather")
    assert json.loads(first.function.arguments) == {"city": "Rome"}
    assert first.id != second.id
    assert choice.message.content == "Let me see."
    assert choice.finish_reason == "tool_calls"


async def test_a_call_alone_has_no_content(frontend, talking, hello):
    async with frontend(talking(CALL), **PARSERS) as (_, client):
        answer = await client.chat.completions.create(**hello, tools=TOOLS)
        assert answer.choices[0].message.content is None
        without = await client.chat.completions.create(**hello)
    assert without.choices[0].message.content == CALL
    assert without.choices[0].message.tool_calls is None


async def test_a_call_in_pieces(frontend, talking, hello):
    async with frontend(talking("Look:" + CALL + CALL, interval=0.001), **PARSERS) as (_, client):
        stream = await client.chat.completions.create(**hello, tools=TOOLS, stream=True)
        first, *chunks = [chunk.choices[0] async for chunk in stream]
    assert first.delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in chunks) == "Look:"
    pieces = [piece for c in chunks for piece in c.delta.tool_calls or ()]
    for index in range(2):
        begin, *others = [piece for piece in pieces if piece.index == index]
        assert (begin.type, begin.function.name) == ("function", "weather")
        assert begin.id
        assert all(p.id is None and p.type is None and p.function.name is None for p in others)
        arguments = "".join(p.function.arguments for p in [begin, *others])
        assert json.loads(arguments) == {"city": "Rome"}
    assert [c.finish_reason for c in chunks if c.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("streamed", [False, True])
async def test_reasoning(frontend, talking, hello, streamed):
    async with frontend(talking("<think>so\n</think>yes"), **PARSERS) as (_, client):
        for include, reasoning in [(None, "so"), (True, "so"), (False, "")]:
            got = await client.chat.completions.create(
                **hello, stream=streamed, extra_body={"include_reasoning": include}
            )
            if streamed:
                deltas = [chunk.choices[0].delta async for chunk in got]
            else:
                deltas = [got.choices[0].message]
                assert got.usage.completion_tokens_details.reasoning_tokens == REASONED
            for name in ("reasoning_content", "reasoning"):
                assert "".join(getattr(d, name, "") or "" for d in deltas).strip() == reasoning
            assert "".join(d.content or "" for d in deltas).strip() == "yes"


async def test_what_was_called_and_returned_is_in_the_prompt(frontend, talking, hello, post):
    engine = talking(CALL)
    async with frontend(engine, **PARSERS) as (app, client):
        answer = await client.chat.completions.create(**hello, tools=TOOLS)
        message = answer.choices[0].message
        result = {"role": "tool", "content": "22", "tool_call_id": message.tool_calls[0].id}
        messages = [*hello["messages"], message, result]
        await client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
        body = {"messages": [*hello["messages"], message.model_dump(), result], "tools": TOOLS}
        response = await post(f"{app.url}/tokenize", json.dumps(body).encode())
        tokens = json.loads(response.body)["tokens"]
        assert tokens == list(engine.submits[1].prompt_token_ids)
        text = json.loads(
            (await post(f"{app.url}/detokenize", json.dumps({"tokens": tokens}).encode())).body
        )["prompt"]
    assert '"name": "weather"' in text
    assert "Rome" in text
    assert "22" in text


async def test_what_must_be_called_is_constrained(frontend, talking, hello):
    named = {"type": "function", "function": {"name": "weather"}}
    engine = talking(CALL)
    async with frontend(engine, **PARSERS) as (_, client):
        for choice in ("required", named, "none", "auto", None):
            await client.chat.completions.create(
                **hello, tools=TOOLS, **({} if choice is None else {"tool_choice": choice})
            )
    constrained = [submit.HasField("constraint") for submit in engine.submits]
    assert constrained == [True, True, False, False, False]


WRONG = [
    ({"tools": [*TOOLS, *TOOLS]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 5}}}]},
        "tools[0].function.parameters",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}},
     "tool_choice"),
    (
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]},
     "messages[0].reasoning_content"),
]  # fmt: skip


async def test_what_is_wrong_is_named(frontend, talking, hello):
    engine = talking("a")
    async with frontend(engine, **PARSERS) as (_, client):
        for arguments, param in WRONG:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**{**hello, **arguments})
            assert caught.value.param == param, arguments
    assert not engine.submits


@pytest.mark.few(3)
@pytest.mark.parametrize("arguments", [r'{"a": "\ud83d"}', '{"', "", "[1]", "a b", '{"a": NaN}'])
async def test_whatever_arguments_an_answer_has_can_be_sent_back(
    frontend, scripted, post, hello, arguments
):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "?"}
    body = json.dumps(hello | {"messages": [*hello["messages"], called, result]}).encode()
    async with frontend(scripted("a", eos=True, max_model_len=4096)) as (app, _):
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await post(f"{app.url}{path}", body)
            assert answer.status == 200, answer.body
