"""OpenAI's Responses API with its client; the engine's text is scripted, in Hermes' format."""

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest
from pydantic import BaseModel

from octavo.common.settings import SettingsError
from octavo.router.http.responses.store import GIB, ResponseStore, Stored
from octavo.router.tenants.tenant import hash_key

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}
CUSTOM = {"type": "custom", "name": "run"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
RUN = '<tool_call>\n{"name": "run", "arguments": {"input": "ls\\n-l"}}\n</tool_call>'
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}
ASK = {"model": "tiny", "input": "hi"}


@pytest.fixture
def answering(frontend, scripted):
    @asynccontextmanager
    async def start(text, *, eos=True, key="none", settings=PARSERS, **options):
        options = {"max_model_len": 4096, "features": {"constraints": True}, **options}
        engine = scripted(text, eos=eos, **options)
        async with frontend(engine, key=key, **settings) as (app, client):
            yield app, engine, client

    return start


async def prompt(app, post, engine) -> list[list[str]]:
    body = json.dumps({"tokens": list(engine.submits[-1].prompt_token_ids)}).encode()
    text = json.loads((await post(f"{app.url}/detokenize", body)).body)["prompt"]
    return [turn.split(":", 1) for turn in text.split("<s>")[1:]]


async def test_whole_and_streamed_answers_have_the_same_items(answering):
    text = "<think>so</think>\n\nLook:" + CALL + RUN
    async with answering(text) as (_, _, client):
        asked = {**ASK, "tools": [TOOL, CUSTOM], "include": ["reasoning.encrypted_content"]}
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        async with client.responses.stream(**asked) as stream:
            final = await stream.get_final_response()
    assert [item.type for item in whole.output] == [
        *("reasoning", "message", "function_call", "custom_tool_call")
    ]
    reasoning, message, call, run = whole.output
    assert reasoning.content[0].text == "so"
    assert reasoning.encrypted_content
    assert message.content[0].text.strip() == "Look:"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert (run.name, run.input) == ("run", "ls\n-l")
    assert (whole.status, whole.error, whole.incomplete_details) == ("completed", None, None)
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens

    def shown(response):
        changing = {"id", "call_id", "parsed_arguments", "parsed"}
        return [item.to_dict() | dict.fromkeys(changing & set(item.to_dict())) for item in response]

    streamed = events[-1].response
    assert shown(streamed.output) == shown(whole.output)
    assert len(final.output) == len(whole.output)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    assert names[:2] == ["created", "in_progress"]
    assert names[-1] == "completed"
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert shown(done) == shown(streamed.output)
    for kind in ("output_text", "reasoning_text", "function_call_arguments"):
        pieces = [e.delta for e in events if e.type == f"response.{kind}.delta"]
        (end,) = [e for e in events if e.type == f"response.{kind}.done"]
        assert "".join(pieces) == getattr(end, "text", None) or end.arguments


async def test_a_conversation_is_sent_back_or_stored(answering, post):
    async with answering("<think>so</think>Look:" + CALL) as (app, engine, client):
        asked = {"model": "tiny", "tools": [TOOL], "instructions": "Be brief."}
        first = await client.responses.create(**asked, input="hi")
        call = first.output[-1]
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "22"}
        await client.responses.create(
            **asked, input=[{"role": "user", "content": "hi"}, *first.output, result], store=False
        )
        sent_back = await prompt(app, post, engine)
        second = await client.responses.create(
            **asked, input=[result], previous_response_id=first.id
        )
        assert await prompt(app, post, engine) == sent_back
        third = await client.responses.create(
            model="tiny", input="So?", previous_response_id=second.id
        )
        assert third.previous_response_id == second.id
        turns = await prompt(app, post, engine)
        assert [role for role, _ in turns] == [
            *("user", "assistant", "user", "assistant", "user", "assistant")
        ]
        found = await client.responses.retrieve(second.id)
        assert found.to_dict() == second.to_dict()
        items = await client.responses.input_items.list(second.id, order="asc")
        assert [item.type for item in items.data] == [
            *("message", "reasoning", "message", "function_call", "function_call_output")
        ]
        counted = await client.responses.input_tokens.count(model="tiny", input="hi")
        assert counted.input_tokens == len("<user:hi<assistant:")
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(second.id)
        await client.responses.delete(second.id)
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(second.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(**ASK, previous_response_id=second.id)
        assert caught.value.code == "previous_response_not_found"


async def test_tenants_do_not_share_responses(answering, tmp_path):
    file = tmp_path / "tenants.toml"
    file.write_text(
        "".join(f'[{who}]\nkeys = ["{hash_key(f"{who}-key")}"]\n' for who in ("alice", "bob"))
    )
    settings = {"tenants": file}
    async with answering("a", key="alice-key", settings=settings) as (_, _, client):
        response = await client.responses.create(**ASK)
        bob = client.with_options(api_key="bob-key")
        for call in (bob.responses.retrieve, bob.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(response.id)
        assert (await client.responses.retrieve(response.id)).id == response.id


async def test_sealed_reasoning_is_read_again(answering):
    async with answering("<think>so</think>yes") as (_, _, client):
        first = await client.responses.create(**ASK, include=["reasoning.encrypted_content"])
        item = {
            "type": "reasoning",
            "summary": [],
            "encrypted_content": first.output[0].encrypted_content,
        }
        question = {"role": "user", "content": "?"}
        await client.responses.create(model="tiny", input=[item, question])
        item["encrypted_content"] += "?"
        with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.encrypted_content"):
            await client.responses.create(model="tiny", input=[item, question])


async def test_namespaces_and_choices_of_tools(answering):
    text = CALL.replace("weather", "web.weather")
    spaced = {"type": "namespace", "name": "web", "description": "", "tools": [TOOL]}
    async with answering(text) as (_, engine, client):
        for choice in (
            "required",
            {"type": "function", "name": "weather", "namespace": "web"},
            {"type": "allowed_tools", "mode": "required", "tools": [
                {"type": "function", "name": "weather", "namespace": "web"}]},
            "auto",
            "none",
        ):  # fmt: skip
            answer = await client.responses.create(
                **ASK, tools=[spaced, CUSTOM], tool_choice=choice
            )
            if choice == "auto":
                (call,) = answer.output
        assert (call.name, call.namespace) == ("weather", "web")
        regex = CUSTOM | {"format": {"type": "grammar", "syntax": "regex", "definition": "[ab]"}}
        await client.responses.create(**ASK, tools=[regex])
    constrained = [submit.HasField("constraint") for submit in engine.submits]
    assert constrained == [True, True, True, False, False, True]


async def test_an_output_that_is_cut(answering):
    async with answering("hello", eos=False) as (_, _, client):
        events = await client.responses.create(**ASK, max_output_tokens=5, stream=True)
        *_, last = [event async for event in events]
        assert last.type == "response.incomplete"
        assert last.response.incomplete_details.reason == "max_output_tokens"
        assert last.response.output[0].status == "incomplete"


async def test_the_form_of_the_text(answering):
    class City(BaseModel):
        city: str

    async with answering('{"city": "x"}') as (_, engine, client):
        parsed = await client.responses.parse(**ASK, text_format=City)
        assert parsed.output_parsed == City(city="x")
        await client.responses.create(**ASK, text={"format": {"type": "json_object"}})
        assert all(submit.HasField("constraint") for submit in engine.submits)


async def test_log_probabilities(answering):
    async with answering("ab") as (_, engine, client):
        include = ["message.output_text.logprobs"]
        await client.responses.create(**ASK, include=include, top_logprobs=3)
        assert engine.submits[0].output.logprobs == 3


async def test_truncation_drops_the_oldest_turns(answering, post):
    turns = [{"role": "developer", "content": "Be brief."}]
    for i in range(9):
        turns += [{"role": "user", "content": f"{i}" * 500}, {"role": "assistant", "content": "ok"}]
    turns.append({"role": "user", "content": "last"})
    async with answering("a", max_model_len=2048) as (app, engine, client):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model="tiny", input=turns)
        assert caught.value.code == "context_length_exceeded"
        await client.responses.create(model="tiny", input=turns, truncation="auto")
        shown = await prompt(app, post, engine)
    assert shown[0] == ["system", "Be brief."]
    assert [text[0] for role, text in shown if role == "user"] == ["8", "l"]


async def test_each_status_has_its_exception(answering):
    settings = {"api_key": "key", "max_message_bytes": 2048, "max_calls_per_peer": 1}
    async with answering("a", key="key", interval=None, settings=settings) as (app, engine, client):

        async def fails(kind, status, **arguments):
            with pytest.raises(kind) as caught:
                await client.responses.create(**ASK | arguments)
            assert caught.value.status_code == status
            assert caught.value.body.keys() == {"message", "type", "param", "code"}
            return caught.value

        stranger = {"Authorization": "Bearer guess"}
        refused = await fails(openai.AuthenticationError, 401, extra_headers=stranger)
        assert refused.code == "invalid_api_key"
        assert (await fails(openai.NotFoundError, 404, model="huge")).code == "model_not_found"
        wrong = await fails(openai.BadRequestError, 400, temperature="hot")  # 422 is never sent
        assert wrong.param == "temperature"
        await fails(openai.APIStatusError, 413, instructions="x" * 3000)
        call = asyncio.create_task(client.responses.create(**ASK))
        await app.until(lambda: engine.submits)
        refused = await fails(openai.RateLimitError, 429)
        assert int(refused.response.headers["retry-after"]) >= 1
        call.cancel()
        await app.clean()
        await engine.kill()
        await app.up(0)
        app.router.pool._links.clear()
        assert (await fails(openai.InternalServerError, 503)).code == "unavailable"
        app.router._http._api._generator = None  # the frontend itself is broken
        await fails(openai.InternalServerError, 500)


async def test_a_failure_within_a_stream(answering, encode):
    async with answering("a", interval=None) as (app, engine, client):
        task = asyncio.create_task(client.responses.create(**ASK, stream=True))
        await app.until(lambda: engine.submits)
        (submit,) = engine.submits
        engine.send(started=[{"request_id": submit.request_id}])
        engine.send_tokens(submit.request_id, encode("ab"))
        stream, heard = await task, []

        async def listen():
            async for event in stream:
                heard.append(event)  # noqa: PERF401 - the test looks meanwhile

        listening = asyncio.create_task(listen())
        await app.until(lambda: any(e.type == "response.output_text.delta" for e in heard))
        failure = {"request_id": submit.request_id, "code": 13, "message": "it is on fire"}
        engine.send(failures=[failure])
        await listening
        assert heard[-1].type == "response.failed"
        assert heard[-1].response.error.message == "it is on fire"
        await app.clean()


WRONG = [
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"tools": [{"type": "web_search"}]}, r"tools\[0\]\.type"),
    ({"tools": [TOOL, TOOL]}, r"tools\[1\]\.name"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]\.type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
     r"input\[0\]: model 'tiny' reads no images"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": ""}]}]},
     r"input\[0\].*\.image_url must be set"),
    ({"input": []}, "input"),
    ({"temperature": -1}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, r"text\.format\.schema"),
    ({"tool_choice": "required"}, "tool_choice"),
]  # fmt: skip


async def test_what_is_wrong_is_named(answering):
    async with answering("a") as (_, engine, client):
        for arguments, param in WRONG:
            with pytest.raises(openai.BadRequestError, match=param):
                await client.responses.create(**{**ASK, **arguments})
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(**{**ASK, "model": "huge"})
        assert not engine.submits


async def test_a_store_outlasts_its_router_and_drops_the_oldest(tmp_path):
    path, sized = tmp_path / "responses.sqlite", 1_000
    body = {"id": "", "output": [], "text": "x" * sized}
    store = ResponseStore(path, 5 * sized / GIB)
    for i in range(9):
        await store.put("t", Stored(body | {"id": str(i)}, []))
    await store.close()
    store = ResponseStore(path, 5 * sized / GIB)
    await store.put("t", Stored(body | {"id": "8"}, []))  # replaces one of the same size
    there = [i for i in range(9) if await store.get("t", str(i)) is not None]
    assert there == [5, 6, 7, 8]
    assert await store.get("other", "8") is None
    await store.close()
    assert path.stat().st_mode & 0o077 == 0
    path.write_text("something else, which is long enough to be no database" * 9)
    with pytest.raises(SettingsError, match="--response-store"):
        ResponseStore(path, 1)


async def test_a_full_disk_takes_no_answer_back(tmp_path):
    store = ResponseStore(tmp_path / "store", 1)
    await store.put("", Stored({"id": "a", "output": []}, []))
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    await store.put("", Stored({"id": "b", "output": ["x" * 100_000]}, []))
    assert await store.get("", "b") is None
    assert await store.get("", "a") is not None
    store._database.execute("PRAGMA max_page_count = 100000")
    await store.put("", Stored({"id": "b", "output": ["x" * 100_000]}, []))
    assert await store.get("", "b") is not None
    await store.close()
