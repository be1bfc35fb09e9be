"""gRPC statuses as OpenAI's client knows them."""

import asyncio
import json

import grpc
import openai
import pytest

from octavo.common import rpc


async def test_a_full_queue_says_when_to_come_back(frontend, scripted, hello, fill):
    engine = scripted(interval=None, max_num_seqs=1)
    async with frontend(engine, max_queue_size=0) as (app, client):
        running = await fill(app, client, engine)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(**hello)
        assert caught.value.code == "rate_limit_exceeded"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert int(caught.value.response.headers["retry-after-ms"]) >= 100
        for task in running:
            task.cancel()
        await app.clean()


async def test_requests_per_address_are_limited(frontend, scripted, hello, fill):
    engine = scripted(interval=None, max_num_seqs=1)
    async with frontend(engine, max_calls_per_peer=2) as (app, client):
        running = await fill(app, client, engine)
        with pytest.raises(openai.RateLimitError, match="2 requests of 127") as caught:
            await client.chat.completions.create(**hello)
        assert caught.value.response.headers["retry-after"] == "1"
        assert [model.id async for model in client.models.list()] == ["tiny"]
        for task in running:
            task.cancel()
        await app.clean()
        with pytest.raises(openai.BadRequestError):
            await client.chat.completions.create(**hello, n=0)


async def test_what_does_not_exist_is_404(frontend, scripted, hello):
    async with frontend(scripted("a")) as (_, client):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(**{**hello, "model": "huge"})
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")
        with pytest.raises(openai.NotFoundError, match="'huge' is not served"):
            await client.models.retrieve("huge")
        with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
            await client.embeddings.create(model="tiny", input="x")


async def test_without_an_engine_it_is_503(frontend, hello):
    async with frontend(addresses=["127.0.0.1:1"]) as (_, client):
        with pytest.raises(openai.InternalServerError, match="no engine is up") as caught:
            await client.chat.completions.create(**hello)
        assert caught.value.status_code == 503


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_deadline_passes(frontend, scripted, hello, streamed):
    engine = scripted(interval=None)
    async with frontend(engine) as (app, client):
        with pytest.raises(openai.InternalServerError, match="time was over") as caught:
            await client.chat.completions.create(
                **hello, stream=streamed, extra_headers={"X-Request-Timeout": "0.3"}
            )
        assert caught.value.status_code == 504
        await app.clean()
        await app.until(lambda: engine.aborts)
        for wrong in ("0", "soon", "nan", "inf"):
            with pytest.raises(openai.BadRequestError, match="X-Request-Timeout"):
                await client.chat.completions.create(
                    **hello, extra_headers={"X-Request-Timeout": wrong}
                )


async def test_a_failure_within_a_stream(frontend, scripted, hello, encode):
    engine = scripted(interval=None)
    async with frontend(engine) as (app, client):
        task = asyncio.create_task(client.chat.completions.create(**hello, stream=True))
        await app.until(lambda: engine.submits)
        (submit,) = engine.submits
        engine.send(started=[{"request_id": submit.request_id}])
        engine.send_tokens(submit.request_id, encode("ab"))
        stream = await task
        heard = []

        async def listen():
            async for chunk in stream:
                heard.extend(chunk.choices[0].delta.content or "")

        listening = asyncio.create_task(listen())
        await app.until(lambda: "".join(heard) == "ab")
        failure = {"request_id": submit.request_id, "code": 13, "message": "it is on fire"}
        engine.send(failures=[failure])
        with pytest.raises(openai.APIError, match="it is on fire") as caught:
            await listening
        assert caught.value.body["type"] == "server_error"
        await app.clean()


STATUSES = [
    (grpc.StatusCode.UNAUTHENTICATED, openai.AuthenticationError),
    (grpc.StatusCode.PERMISSION_DENIED, openai.PermissionDeniedError),
    (grpc.StatusCode.FAILED_PRECONDITION, openai.BadRequestError),
    (grpc.StatusCode.UNIMPLEMENTED, openai.BadRequestError),
    (grpc.StatusCode.ALREADY_EXISTS, openai.ConflictError),
    (grpc.StatusCode.INTERNAL, openai.InternalServerError),
]


async def test_every_other_status(frontend, scripted, hello, monkeypatch):
    async with frontend(scripted("a")) as (app, client):
        for code, kind in STATUSES:

            async def fail(*_, code=code, **__):
                raise rpc.RpcError(code, f"it is {code.name}")

            monkeypatch.setattr(app.router.generator, "_prepare", fail)
            with pytest.raises(kind, match=code.name):
                await client.chat.completions.create(**hello)


async def test_an_unexpected_error_hides_its_details(frontend, scripted, hello):
    async with frontend(scripted("a")) as (app, client):
        app.router._http._vocabularies = None  # the frontend itself is broken
        with pytest.raises(openai.InternalServerError, match="the server's log") as caught:
            await client.chat.completions.create(**hello)
        assert "NoneType" not in json.dumps(caught.value.body)
