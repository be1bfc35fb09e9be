"""Clients that leave, that do not read, and a router that stops."""

import asyncio
import json
import socket

import openai
import pytest


def request(body: dict, path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


async def leave(app, engine, body: dict, *, after: bytes = b"") -> None:
    """Sends a request and closes the connection, once the engine has it and `after` has come."""
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
    """Its socket's buffers are small, so that what is unread is felt at once."""
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


async def test_a_drained_router_finishes_streams_and_refuses_others(frontend, scripted, hello):
    engine = scripted("a long answer " * 5, interval=0.01)
    async with frontend(engine) as (app, client):
        stream = await client.chat.completions.create(**hello, stream=True)
        draining = asyncio.create_task(app.router.drain())
        await asyncio.sleep(0.05)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            await client.chat.completions.create(**hello)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "a long answer " * 5
        await draining


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
