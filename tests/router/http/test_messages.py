"""Anthropic's Messages API with its client; the engine's text is scripted, in Hermes' format."""

import asyncio
import json
from contextlib import asynccontextmanager

import anthropic
import pytest

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"name": "weather", "description": "The weather.", "input_schema": SCHEMA}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}
ROLES = len("<user:<assistant:")
"""Tokens of the chat template around one message: one per byte, and one per `<s>`."""
HELLO = [{"role": "user", "content": "hi"}]
ASK = {"model": "tiny", "max_tokens": 500, "messages": HELLO}


@pytest.fixture
def claude(frontend, scripted):
    """Start a router and an engine of a scripted text; yield app, engine and client."""

    @asynccontextmanager
    async def start(text, *, eos=True, key="none", settings=PARSERS, **options):
        options = {"max_model_len": 4096, "features": {"constraints": True}, **options}
        engine = scripted(text, eos=eos, **options)
        async with frontend(engine, **settings) as (app, _):
            http = anthropic.DefaultAsyncHttpxClient(verify=False)
            client = anthropic.AsyncAnthropic(
                base_url=app.url, api_key=key, max_retries=0, http_client=http
            )
            async with client:
                yield app, engine, client

    return start


def kinds(message) -> list[str]:
    return [block.type for block in message.content]


async def test_whole_and_streamed_answers_have_the_same_blocks(claude):
    async with claude("<think>so</think>\n\nLet me see." + CALL + "\n" + CALL) as (_, _, client):
        whole = await client.messages.create(**ASK, tools=[TOOL])
        async with client.messages.stream(**ASK, tools=[TOOL]) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()
    assert kinds(whole) == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[0].thinking == "so"
    assert whole.content[1].text.strip() == "Let me see."
    assert [block.input for block in whole.content[2:]] == [{"city": "Rome"}] * 2
    assert whole.content[2].id != whole.content[3].id
    assert (whole.stop_reason, whole.stop_sequence) == ("tool_use", None)
    assert whole.id.startswith("msg_")
    assert whole._request_id == whole.id

    def shown(message):
        return [block.model_dump(exclude={"id"}) for block in message.content]

    assert shown(streamed) == shown(whole)
    assert streamed.stop_reason == "tool_use"
    assert streamed.usage.output_tokens == whole.usage.output_tokens > 0
    assert whole.usage.output_tokens_details.thinking_tokens > 0
    names = [event.type for event in events]
    assert names[0] == "message_start"
    assert names[-2:] == ["message_delta", "message_stop"]
    starts = [event.index for event in events if event.type == "content_block_start"]
    stops = [event.index for event in events if event.type == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]


async def test_the_events_as_they_are_sent(claude, get):
    async with claude("ab") as (app, _, _):
        body = json.dumps(ASK | {"stream": True}).encode()
        headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
        answer = await get(f"{app.url}/v1/messages?beta=true", headers=headers, data=body)
    events = [one.split("\n") for one in answer.body.decode().rstrip("\n").split("\n\n")]
    assert all(name == f"event: {json.loads(data[6:])['type']}" for name, data in events)
    assert [name[7:] for name, _ in events] == [
        *("message_start", "ping", "content_block_start", "content_block_delta"),
        *("content_block_delta", "content_block_stop", "message_delta", "message_stop"),
    ]
    assert answer.headers["content-type"].startswith("text/event-stream")


async def test_a_silent_stream_sends_pings_and_says_why_it_fails(claude, post):
    settings = {"http_ping_interval": 0.05}
    async with claude("a", interval=None, settings=settings) as (app, engine, client):
        body = json.dumps(ASK | {"stream": True}).encode()
        answer = asyncio.create_task(post(f"{app.url}/v1/messages", body))
        stream = await client.messages.create(**ASK, stream=True)
        await app.until(lambda: len(engine.submits) == 2)
        await asyncio.sleep(0.2)
        for submit in engine.submits:
            engine.send(failures=[{"request_id": submit.request_id, "code": 13}])
        *pings, failure = (await answer).body.decode().rstrip("\n").split("\n\n")
        assert pings
        assert set(pings) == {'event: ping\ndata: {"type":"ping"}'}
        assert failure.startswith('event: error\ndata: {"type":"error","error":{"type":"api_error"')
        with pytest.raises(anthropic.APIStatusError) as caught:
            async for _ in stream:
                pass
        assert caught.value.body["error"]["type"] == "api_error"
        await app.clean()


async def prompt(client, app, post, engine) -> str:
    body = json.dumps({"tokens": list(engine.submits[-1].prompt_token_ids)}).encode()
    return json.loads((await post(f"{app.url}/detokenize", body)).body)["prompt"]


async def test_a_conversation_with_a_call(claude, post):
    async with claude("<think>so</think>Look:" + CALL) as (app, engine, client):
        first = await client.messages.create(**ASK, tools=[TOOL])
        result = {
            "type": "tool_result",
            "tool_use_id": first.content[2].id,
            "content": [{"type": "text", "text": "22"}],
            "cache_control": {"type": "ephemeral"},
        }
        failed = {"type": "tool_result", "tool_use_id": "x", "content": "down", "is_error": True}
        asked = {
            "model": "tiny",
            "tools": [TOOL],
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
                {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                *HELLO,
                {"role": "user", "content": "there"},
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [result, failed, {"type": "text", "text": "So?"}]},
                {"role": "system", "content": "It is late."},
            ],
        }
        await client.messages.create(**asked, max_tokens=500)
        text = await prompt(client, app, post, engine)
        counted = await client.messages.count_tokens(**asked)
        assert counted.input_tokens == len(engine.submits[-1].prompt_token_ids)
    turns = [turn.split(":", 1) for turn in text.split("<s>")[1:]]
    assert [role for role, _ in turns] == [
        *("system", "user", "assistant", "user", "user", "user", "system", "assistant")
    ]
    assert turns[0][1].startswith("Be brief.\n")
    assert turns[1][1] == "hi\nthere"
    assert '{"city": "Rome"}' in turns[2][1]
    assert "22" in turns[3][1]
    assert "Error:\ndown" in turns[4][1]


async def test_the_last_message_of_an_assistant_is_continued(claude, post):
    async with claude("b") as (app, engine, client):
        messages = [*HELLO, {"role": "assistant", "content": "a"}]
        await client.messages.create(**ASK | {"messages": messages})
        assert (await prompt(client, app, post, engine)).endswith("<s>assistant:a")


async def test_choices_of_tools(claude):
    async with claude(CALL) as (_, engine, client):
        for choice in (
            {"type": "any"},
            {"type": "tool", "name": "weather"},
            {"type": "auto", "disable_parallel_tool_use": True},
            {"type": "auto"},
            {"type": "none"},
        ):
            answer = await client.messages.create(**ASK, tools=[TOOL], tool_choice=choice)
        assert kinds(answer) == ["text"]
        await client.messages.create(**ASK, tools=[TOOL | {"strict": True}])
    constrained = [submit.HasField("constraint") for submit in engine.submits]
    assert constrained == [True, True, True, False, False, True]


async def test_reasons_to_stop(claude):
    async with claude("hello world") as (_, _, client):
        for arguments, reason, sequence in (
            ({}, "end_turn", None),
            ({"stop_sequences": [" w"]}, "stop_sequence", " w"),
        ):
            answer = await client.messages.create(**ASK | {"max_tokens": 9000} | arguments)
            assert (answer.stop_reason, answer.stop_sequence) == (reason, sequence), arguments
    async with claude("hello", eos=False) as (_, _, client):
        answer = await client.messages.create(**ASK | {"max_tokens": 5})
        assert answer.stop_reason == "max_tokens"
        long = [{"role": "user", "content": "x" * (4096 - len("hello") - ROLES)}]
        answer = await client.messages.create(**ASK | {"messages": long})
        assert answer.stop_reason == "model_context_window_exceeded"


async def test_thinking(claude):
    async with claude("<think>so\n</think>yes") as (_, _, client):
        for thinking, shown in (
            ({"type": "adaptive"}, ["thinking", "text"]),
            (
                {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
                ["thinking", "text"],
            ),
            ({"type": "disabled"}, ["text"]),
        ):
            asked = ASK | {"max_tokens": 2000, "thinking": thinking}
            answer = await client.messages.create(**asked)
            async with client.messages.stream(**asked) as stream:
                streamed = await stream.get_final_message()
            assert [block.to_dict() for block in streamed.content] == [
                block.to_dict() for block in answer.content
            ]
            assert kinds(answer) == shown
            if thinking.get("display") == "omitted":
                omitted = answer.content
        assert omitted[0].thinking == ""
        turn = {"role": "assistant", "content": omitted}
        await client.messages.create(**ASK | {"messages": [*HELLO, turn, *HELLO]})
        changed = omitted[0].model_dump() | {"thinking": "other"}
        for wrong in (changed, {**changed, "signature": "octavo:?"}):
            turn = {"role": "assistant", "content": [wrong]}
            with pytest.raises(anthropic.BadRequestError, match=r"messages\[1\].content\[0\]"):
                await client.messages.create(**ASK | {"messages": [*HELLO, turn, *HELLO]})
        turn = {"role": "assistant", "content": [changed | {"signature": "Erv8 of another"}]}
        await client.messages.create(**ASK | {"messages": [*HELLO, turn, *HELLO]})


async def test_a_budget_means_nothing_without_reasoning(claude):
    async with claude("a", settings={"reasoning_parser": "none"}) as (_, engine, client):
        thinking = {"type": "enabled", "budget_tokens": 1024}
        answer = await client.messages.create(**ASK | {"max_tokens": 2000, "thinking": thinking})
        assert answer.content[0].text == "a"
        assert not engine.submits[0].HasField("constraint")


@pytest.mark.parametrize(
    ("written", "parsed"),
    [
        ('{"city": "Ro', {"city": "Ro"}),
        ('{"city": Rome}', {"arguments": '{"city": Rome}'}),
    ],
)
async def test_input_is_always_an_object(claude, written, parsed):
    text = '<tool_call>\n{"name": "weather", "arguments": ' + written
    async with claude(text + "}\n</tool_call>" * (written != '{"city": "Ro')) as (_, _, client):
        whole = await client.messages.create(**ASK, tools=[TOOL])
        async with client.messages.stream(**ASK, tools=[TOOL]) as stream:
            streamed = await stream.get_final_message()
    assert whole.content[-1].input == streamed.content[-1].input == parsed


async def test_eager_input_comes_in_pieces(claude):
    async with claude(CALL, interval=0.001) as (_, _, client):
        for tool, several in ((TOOL, False), (TOOL | {"eager_input_streaming": True}, True)):
            stream = await client.messages.create(**ASK, tools=[tool], stream=True)
            deltas = [e.delta async for e in stream if e.type == "content_block_delta"]
            pieces = [d.partial_json for d in deltas if d.type == "input_json_delta"]
            assert json.loads("".join(pieces)) == {"city": "Rome"}
            assert (len(pieces) > 1) == several


async def test_the_form_of_the_text(claude):
    async with claude('{"city": "x"}') as (_, engine, client):
        config = {"format": {"type": "json_schema", "schema": SCHEMA}, "effort": "max"}
        await client.messages.create(**ASK, output_config=config)
        assert engine.submits[0].HasField("constraint")
        with pytest.raises(anthropic.BadRequestError, match=r"^Error.*config\.format\.schema excl"):
            await client.messages.create(
                **ASK, output_config=config, tools=[TOOL], tool_choice={"type": "any"}
            )


async def test_what_changes_nothing_is_named(claude):
    async with claude("a") as (_, _, client):
        raw = await client.messages.with_raw_response.create(
            **ASK,
            metadata={"user_id": "u"},
            service_tier="auto",
            extra_body={"context_management": {"edits": []}, "top_k": 1, "min_p": 0.1},
        )
        assert raw.headers["x-ignored-arguments"] == "context_management"


WRONG = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
     r"messages\[0\]\.content\[0\]\.source\.type"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
     r"messages\[0\]\.content\[0\]\.source\.url must be set"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]\.type"),
    ({"tools": [TOOL, TOOL]}, r"tools\[1\]\.name repeats"),
    ({"tools": [TOOL | {"input_schema": {"type": 5}}]}, r"tools\[0\]\.input_schema"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"container": "x"}, "container is not supported"),
    ({"stop_sequences": ["x" * 300]}, "stop_sequences"),
    ({"messages": [HELLO[0] | {"content": [{"type": "tool_use", "name": "f"}]}], "system": "a"},
     r"messages\[0\] belongs"),
    ({"messages": HELLO * 5000}, "tokens"),
]  # fmt: skip


async def test_what_is_wrong_is_named(claude):
    async with claude("a") as (_, engine, client):
        for arguments, message in WRONG:
            with pytest.raises(anthropic.BadRequestError, match=message) as caught:
                await client.messages.create(**ASK, extra_body=arguments)
            assert caught.value.body["type"] == "error"
            assert caught.value.type == "invalid_request_error"
            assert caught.value.request_id == caught.value.body["request_id"]
        assert not engine.submits


async def test_each_status_has_its_exception(claude):
    settings = {"api_key": "key", "max_message_bytes": 2048, "max_calls_per_peer": 1}
    async with claude("a", key="key", interval=None, max_num_seqs=1, settings=settings) as (
        app,
        engine,
        client,
    ):

        async def fails(kind, error, **arguments):
            with pytest.raises(kind) as caught:
                await client.messages.create(**ASK | arguments)
            assert caught.value.body["type"] == "error"
            assert caught.value.type == error
            return caught.value.response

        stranger = {"Authorization": "Bearer guess"}
        await fails(anthropic.AuthenticationError, "authentication_error", extra_headers=stranger)
        await fails(anthropic.NotFoundError, "not_found_error", model="huge")
        await fails(anthropic.ContentTooLargeError, "request_too_large", system="x" * 3000)
        call = asyncio.create_task(client.messages.create(**ASK))
        await app.until(lambda: engine.submits)
        refused = await fails(anthropic.RateLimitError, "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        call.cancel()
        await app.clean()
        app.router._http._api._generator = None  # the frontend itself is broken
        await fails(anthropic.InternalServerError, "api_error")


async def test_models_are_listed_in_the_api_s_form(claude):
    async with claude("a") as (_, _, client):
        (model,) = [each async for each in client.models.list()]
        assert (model.id, model.type, model.max_input_tokens) == ("tiny", "model", 4096)
        assert await client.models.retrieve("tiny") == model
        with pytest.raises(anthropic.NotFoundError, match="'huge' is not served") as caught:
            await client.models.retrieve("huge")
        assert caught.value.body["error"]["type"] == "not_found_error"


async def test_the_key_may_be_in_the_api_s_own_header(claude, get):
    async with claude("a", settings={"api_key": "key"}) as (app, _, _):
        body = json.dumps(ASK).encode()
        for key, status in (("key", 200), ("guess", 401)):
            headers = {"Content-Type": "application/json", "X-Api-Key": key}
            answer = await get(f"{app.url}/v1/messages", headers=headers, data=body)
            assert answer.status == status


async def test_without_an_engine_it_is_503(frontend):
    async with frontend(addresses=["127.0.0.1:1"]) as (app, _):
        client = anthropic.AsyncAnthropic(base_url=app.url, auth_token="x", max_retries=0)
        with pytest.raises(anthropic.InternalServerError, match="no engine is up") as caught:
            await client.messages.create(**ASK)
        assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
