"""Clients that disconnect or do not read, and a router that stops."""

import asyncio
import contextlib
import json
import socket

import openai
import pytest

from octavo.v1.sampling_pb2 import FinishReason


def request(body: dict, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def leave(app, engine, body: dict, *, after: bytes = b"") -> None:
    """Send a request; close the connection once the engine has it and `after` has arrived."""
    submits = len(engine.submits)
    host, port = app.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request(body))
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    await app.until(lambda: len(engine.submits) == submits + len(prompts))
    if after:
        await reader.readuntil(after)
    writer.close()


async def test_a_client_that_leaves_frees_everything(frontend, scripted):
    engine = scripted("a long answer " * 30, interval=0.02)
    async with frontend(engine) as (app, _):
        body = {"prompt": "x", "max_tokens": 400}
        await leave(app, engine, body)  # waits for a whole answer
        await app.until(lambda: len(engine.aborts) == 1)
        await leave(app, engine, {**body, "stream": True}, after=b'"text":"a"')
        await app.until(lambda: len(engine.aborts) == 2)
        await leave(app, engine, {**body, "stream": True, "prompt": ["x", "y"]}, after=b"data:")
        await app.until(lambda: len(engine.aborts) == 4)
        await app.clean()


async def test_a_client_that_leaves_is_removed_from_the_queue(frontend, scripted, hello, fill):
    engine = scripted(interval=None, max_num_seqs=1)
    async with frontend(engine) as (app, client):
        running = await fill(app, client, engine)
        for streamed in (False, True):
            task = asyncio.create_task(client.chat.completions.create(**hello, stream=streamed))
            await app.until(lambda: len(app.router.admission) == 1)
            task.cancel()
            await app.until(lambda: len(app.router.admission) == 0)
        for task in running:
            task.cancel()
        await app.clean()


async def test_a_client_that_does_not_read_is_cancelled(frontend, scripted):
    """Its socket's buffers are small, so that unread data has an effect at once."""
    text = "x" * 400
    engine = scripted(text, interval=0.0)
    async with frontend(engine, write_timeout=1.0, max_unread_tokens=50) as (app, client):
        host, port = app.url.removeprefix("http://").split(":")
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        deaf.connect((host, int(port)))
        body = {"prompt": ["x"] * 100, "max_tokens": 400, "n": 8, "stream": True}
        deaf.sendall(request(body))
        await app.until(lambda: engine.submits)
        await app.until(lambda: app.router.generator.in_flight == 0, 60)
        await app.clean()
        answer = await client.completions.create(model="tiny", prompt="x", max_tokens=400)
        assert answer.choices[0].text == text
        deaf.close()


async def test_a_stopped_router_fails_its_streams(frontend, scripted, hello, encode):
    engine = scripted(interval=None)
    async with frontend(engine) as (app, client):
        task = asyncio.create_task(client.chat.completions.create(**hello, stream=True))
        await app.until(lambda: engine.submits)
        (submit,) = engine.submits
        engine.send(started=[{"request_id": submit.request_id}])
        stream = await task
        stopping = asyncio.create_task(app.router.stop())
        with pytest.raises(openai.APIError, match="shut down before"):
            async for _ in stream:
                pass
        await asyncio.wait_for(stopping, 20)


@contextlib.asynccontextmanager
async def asked(app):
    """Request a stream; yield its status line, the rest, and the header's latency."""
    loop = asyncio.get_running_loop()
    host, port = app.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request({"prompt": "x", "max_tokens": 5, "stream": True}))
    began = loop.time()
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    yield head.partition(b"\r\n")[0], reader, loop.time() - began
    writer.close()


async def events(reader: asyncio.StreamReader, count: int) -> list[bytes]:
    """Read lines of a chunked body that are neither empty nor sizes of chunks."""
    found = []
    while len(found) < count:
        line = await asyncio.wait_for(reader.readline(), 10)
        assert line, f"it ended after {found}"
        if line.startswith((b":", b"data:")):
            found.append(line.strip())
    return found


async def until(reader: asyncio.StreamReader, ends: bytes) -> list[bytes]:
    """Read a stream's lines up to the first that has `ends`."""
    found = [b""]
    while ends not in found[-1]:
        found += await events(reader, 1)
    return found


async def test_a_silent_stream_gets_its_header_and_pings(frontend, scripted, fill):
    """Queued streams, and streams with long gaps between tokens, get pings."""
    engine = scripted(interval=None, max_num_seqs=1)
    async with frontend(engine, http_ping_interval=0.2) as (app, client):
        running = await fill(app, client, engine)
        async with asked(app) as (status, reader, seconds):
            assert status == b"HTTP/1.1 200 OK"
            assert 0.2 <= seconds < 2
            assert await events(reader, 3) == [b": ping"] * 3
            for task in running:
                task.cancel()
            await app.until(lambda: len(engine.submits) == 3)
            request_id = engine.submits[-1].request_id
            engine.send(started=[{"request_id": request_id}])
            engine.send_tokens(request_id, [65])
            assert b'"text":"b"' in (await until(reader, b"data:"))[-1]
            assert await events(reader, 2) == [b": ping"] * 2
            engine.send_tokens(request_id, [66], reason=FinishReason.FINISH_REASON_LENGTH)
            assert b'"text":"c"' in (await until(reader, b"data:"))[-1]
            assert (await until(reader, b"[DONE]"))[-1] == b"data: [DONE]"
        await app.clean()


async def test_a_stream_that_fails_early_has_an_http_status(frontend, scripted, hello, fill):
    engine = scripted(interval=None, max_num_seqs=1)
    settings = {"max_queue_time": 0.2, "http_ping_interval": 5.0}
    async with frontend(engine, **settings) as (app, client):
        running = await fill(app, client, engine)
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(**hello, stream=True)
        for task in running:
            task.cancel()


async def test_a_stream_that_fails_after_its_header_ends_with_the_error(
    frontend, scripted, hello, fill
):
    engine = scripted(interval=None, max_num_seqs=1)
    settings = {"max_queue_time": 0.5, "http_ping_interval": 0.1}
    async with frontend(engine, **settings) as (app, client):
        running = await fill(app, client, engine)
        stream = await client.chat.completions.create(**hello, stream=True)
        with pytest.raises(openai.APIError, match="no engine had room") as caught:
            await anext(aiter(stream))
        assert caught.value.code == "rate_limit_exceeded"
        for task in running:
            task.cancel()
