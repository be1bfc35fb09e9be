"""gRPC statuses as OpenAI's client reports them."""

import asyncio
import json
import logging
import operator
import re

import grpc
import openai
import pytest
import structlog

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
        with pytest.raises(openai.NotFoundError, match="/v1/moderations"):
            await client.moderations.create(input="x")
        with pytest.raises(openai.BadRequestError, match="'tiny' generates text") as caught:
            await client.embeddings.create(model="tiny", input="x")
        assert caught.value.param == "model"


async def test_without_an_engine_it_is_503(frontend, hello):
    async with frontend(addresses=["127.0.0.1:1"]) as (_, client):
        with pytest.raises(openai.InternalServerError, match="no engine is up") as caught:
            await client.chat.completions.create(**hello)
        assert caught.value.status_code == 503


async def test_a_model_of_an_engine_that_may_still_connect_is_503(frontend, scripted, hello):
    async with frontend(scripted("a"), addresses=["127.0.0.1:1"]) as (_, client):
        with pytest.raises(openai.InternalServerError, match="model 'huge', but one may") as caught:
            await client.chat.completions.create(**{**hello, "model": "huge"})
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError):
            await client.models.retrieve("huge")


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_deadline_passes(frontend, scripted, hello, streamed):
    engine = scripted(interval=None)
    async with frontend(engine) as (app, client):
        with pytest.raises(openai.InternalServerError, match="deadline passed") as caught:
            await client.chat.completions.create(
                **hello, stream=streamed, extra_headers={"X-Request-Timeout": "0.3"}
            )
        assert caught.value.status_code == 504
        assert caught.value.response.headers["x-should-retry"] == "false"
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

            monkeypatch.setattr(app.router.generator._preparer, "prepare", fail)
            with pytest.raises(kind, match=code.name):
                await client.chat.completions.create(**hello)


async def test_an_unexpected_error_hides_its_details(frontend, scripted, hello):
    async with frontend(scripted("a")) as (app, client):
        app.router._http._vocabularies = None  # the frontend itself is broken
        with pytest.raises(openai.InternalServerError, match="the server's log") as caught:
            await client.chat.completions.create(**hello)
        assert "NoneType" not in json.dumps(caught.value.body)


async def test_what_the_context_or_the_cache_cannot_hold_has_openai_s_code(
    frontend, scripted, hello
):
    engine = scripted("a")
    engine.info.load.total_blocks = 64  # 1,024 tokens
    async with frontend(engine) as (_, client):
        long = [{"role": "user", "content": "x" * 600}]
        for call in (
            client.chat.completions.create(**hello | {"messages": long}),
            client.chat.completions.create(**hello | {"messages": hello["messages"] * 600}),
            client.completions.create(model="tiny", prompt="x" * 600),
            client.completions.create(model="tiny", prompt=[1] * 600),
            client.completions.create(model="tiny", prompt="x" * 500, max_tokens=13),
            client.chat.completions.create(**hello, max_completion_tokens=5000),
            client.chat.completions.create(**hello, extra_body={"min_tokens": 600}),
            client.chat.completions.create(**hello, n=8, max_tokens=200),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                await call
            assert caught.value.code == "context_length_exceeded"


async def test_a_negative_number_is_told_its_range(frontend, scripted, hello):
    async with frontend(scripted("a")) as (_, client):
        with pytest.raises(openai.BadRequestError, match=r"max_tokens must be in \[1, .*got -1"):
            await client.chat.completions.create(**hello, max_tokens=-1)
        with pytest.raises(openai.BadRequestError, match=r"min_tokens must be in \[0, .*got -2"):
            await client.chat.completions.create(**hello, extra_body={"min_tokens": -2})


async def test_every_error_has_an_id(frontend, scripted, hello):
    async with frontend(scripted("a")) as (_, client):
        for call, given, expected in (
            (client.chat.completions.create(**hello, n=0), None, r"[0-9a-f]{32}"),
            (client.models.retrieve("huge", extra_headers={"X-Request-Id": "a-1"}), "a-1", "a-1"),
            (client.embeddings.create(model="tiny", input="x"), None, r"[0-9a-f]{32}"),
        ):
            with pytest.raises(openai.APIStatusError) as caught:
                await call
            assert re.fullmatch(expected, caught.value.response.headers["x-request-id"]), given
        for wrong in ("a b", "x" * 101, ""):
            answer = await client.chat.completions.with_raw_response.create(
                **hello, extra_headers={"X-Request-Id": wrong}
            )
            assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", answer.headers["x-request-id"])


async def test_an_id_of_the_client_s_own_names_answers_and_streams(frontend, scripted, hello):
    mine = {"X-Request-Id": "mine"}
    create = "chat.completions.with_raw_response.create"
    async with frontend(scripted("a")) as (_, client):
        for streamed in (False, True):
            answer = await operator.attrgetter(create)(client)(
                **hello, stream=streamed, extra_headers=mine
            )
            assert answer.headers["x-request-id"] == "mine"
            if not streamed:
                assert answer.parse().id == "chatcmpl-mine"


class Contexts(logging.Handler):
    """Records the context of log lines."""

    def __init__(self):
        super().__init__()
        self.kept = []

    def emit(self, record):
        self.kept.append((record.getMessage(), structlog.contextvars.get_contextvars()))


async def test_a_failure_is_found_in_the_log_by_its_id(frontend, scripted, get, monkeypatch):
    logged = Contexts()
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handlers", [logged])
    monkeypatch.delattr("octavo.router.http.app.own_version")  # the frontend itself is broken
    async with frontend(scripted("a")) as (app, _):
        response = await get(f"{app.url}/version", headers={"X-Request-Id": "a-1"}.items())
        assert (response.status, response.headers["x-request-id"]) == (500, "a-1")
        await get(f"{app.url}/health")
    (context,) = [context for message, context in logged.kept if "Exception in ASGI" in message]
    assert context["http_request_id"] == "a-1"
