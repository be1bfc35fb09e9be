"""Ollama's API with its client; the engine's text is scripted, in Hermes' format."""

import asyncio
from contextlib import asynccontextmanager

import ollama
import pytest

from octavo.common.settings import SettingsError
from octavo.router.settings import RouterSettings

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(frontend, scripted):
    """Start a router and an engine of a scripted text; yield engine and client."""

    @asynccontextmanager
    async def start(text, **options):
        options = {"max_model_len": 4096, "features": {"constraints": True}, **options}
        engine = scripted(text, eos=True, **options)
        settings = {"tool_parser": "hermes", "reasoning_parser": "think", "ollama": True}
        async with frontend(engine, **settings) as (app, _):
            yield engine, ollama.AsyncClient(host=app.url)

    return start


async def test_whole_and_streamed_chats_are_the_same(client):
    async with client("<think>so</think>\n\nLet me see." + CALL + CALL) as (_, asks):
        whole = await asks.chat("tiny:latest", HELLO, tools=[TOOL])
        parts = [part async for part in await asks.chat("tiny", HELLO, tools=[TOOL], stream=True)]
    assert whole.message.thinking == "so"
    assert whole.message.content.strip() == "Let me see."
    assert [call.function.arguments for call in whole.message.tool_calls] == [{"city": "Rome"}] * 2
    assert "".join(part.message.thinking or "" for part in parts) == "so"
    assert "".join(part.message.content for part in parts) == whole.message.content
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == whole.message.tool_calls
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count > 0
    assert parts[-1].done_reason == whole.done_reason == "stop"
    assert 0 < whole.eval_duration < whole.total_duration


async def test_results_of_calls_go_to_them_in_order(client):
    calls = [{"function": {"name": name, "arguments": {"n": 1}}} for name in ("a", "b")]
    turns = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "of b", "tool_name": "b"},
        {"role": "tool", "content": "of a"},
    ]
    async with client("ok") as (_, asks):
        answer = await asks.chat("tiny", [*HELLO, *turns])
    assert answer.message.content == "ok"


async def test_generates_with_options(client):
    async with client("a whole answer") as (engine, asks):
        options = {"num_predict": 3, "temperature": 0, "seed": 5, "top_k": 4, "num_ctx": 2048}
        whole = await asks.generate("tiny", "hi", raw=True, options=options)
        parts = [part async for part in await asks.generate("tiny", "hi", stream=True)]
        loaded = await asks.generate("tiny")
    assert whole.response == "a whole answer"
    submit = engine.submits[0]
    assert (submit.sampling.seed, submit.sampling.top_k, submit.stop.max_tokens) == (5, 4, 3)
    assert len(submit.prompt_token_ids) == len("hi")
    assert "".join(part.response for part in parts) == "a whole answer"
    assert (loaded.response, loaded.done_reason) == ("", "load")


async def test_lists_models_and_refuses_in_its_shape(client):
    async with client("a") as (_, asks):
        assert [model.model for model in (await asks.list()).models] == ["tiny"]
        assert [model.model for model in (await asks.ps()).models] == ["tiny"]
        assert "completion" in (await asks.show("tiny")).capabilities
        with pytest.raises(ollama.ResponseError, match="model 'x' is not served") as raised:
            await asks.chat("x", HELLO)
        assert raised.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="is not loaded on demand"):
            await asks.generate("tiny", keep_alive=0)
        with pytest.raises(ollama.ResponseError, match=r"options\.num_predict"):
            await asks.generate("tiny", "hi", options={"num_predict": 0})
        with pytest.raises(ollama.ResponseError, match="images"):
            await asks.generate("tiny", "hi", images=["aGk="])
        with pytest.raises(ollama.ResponseError, match="generates text: use Generate"):
            await asks.embed("tiny", "hi")


async def test_each_status_is_an_error_of_the_client(frontend, scripted):
    engine = scripted(interval=None, max_num_seqs=1)
    settings = {"api_key": "key", "max_message_bytes": 2048, "max_calls_per_peer": 1}
    async with frontend(engine, ollama=True, **settings) as (app, _):
        asks = ollama.AsyncClient(host=app.url, headers={"Authorization": "Bearer key"})
        stranger = ollama.AsyncClient(host=app.url)

        async def fails(status, message, client=asks, prompt="hi", **arguments):
            for call in (client.generate, client.chat):
                about = {"prompt": prompt} if call == client.generate else {"messages": HELLO}
                with pytest.raises(ollama.ResponseError, match=message) as raised:
                    await call("tiny", **about | arguments)
                assert raised.value.status_code == status

        await fails(401, "key", stranger)
        await fails(400, "num_predict", options={"num_predict": 0})
        await fails(413, "at most 2048 bytes", options={"stop": ["x" * 3000]})
        running = asyncio.create_task(asks.generate("tiny", "hi"))
        await app.until(lambda: engine.submits)
        await fails(429, "1 requests of 127")
        running.cancel()
        await app.clean()
        await engine.kill()
        await app.up(0)
        app.router.pool._links.clear()
        await fails(503, "no engine is up")
        app.router._http._api._generator = None  # the frontend itself is broken
        await fails(500, "the server's log")


async def test_a_failure_within_a_stream(frontend, scripted, encode):
    engine = scripted(interval=None)
    async with frontend(engine, ollama=True) as (app, _):
        asks = ollama.AsyncClient(host=app.url)
        parts = await asks.generate("tiny", "hi", stream=True)
        listening = asyncio.create_task(anext(parts))
        await app.until(lambda: engine.submits)
        (submit,) = engine.submits
        engine.send(started=[{"request_id": submit.request_id}])
        engine.send_tokens(submit.request_id, encode("ab"))
        assert (await listening).response
        failure = {"request_id": submit.request_id, "code": 13, "message": "it is on fire"}
        engine.send(failures=[failure])
        with pytest.raises(ollama.ResponseError, match="it is on fire"):
            [part async for part in parts]
        await app.clean()


async def test_there_is_none_without_the_flag(frontend, scripted, get):
    async with frontend(scripted("a")) as (app, _):
        assert (await get(f"{app.url}/api/tags")).status == 404
    with pytest.raises(SettingsError, match="--ollama needs --http-port"):
        RouterSettings.load(ollama=True)
