"""A router that drains, as its HTTP clients see it."""

import asyncio
import contextlib
import json
import socket

import httpx
import openai
import pytest

ASK = {"prompt": "x", "max_tokens": 5}


@contextlib.asynccontextmanager
async def drained(app):
    """End a router within a block as on SIGTERM, and wait for its end."""

    async def end() -> None:
        await app.router.drain()
        await app.router.stop()

    ending = asyncio.create_task(end())
    await asyncio.sleep(0)
    yield ending
    await asyncio.wait_for(ending, 30)


async def test_a_draining_router_finishes_streams_and_accepts_no_connection(
    frontend, scripted, hello
):
    engine = scripted("a long answer " * 5, interval=0.01)
    async with frontend(engine) as (app, client):
        stream = await client.chat.completions.create(**hello, stream=True)
        async with drained(app):
            await asyncio.sleep(0.05)
            with pytest.raises(openai.APIConnectionError):
                await client.chat.completions.create(**hello)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            assert text == "a long answer " * 5


async def test_a_kept_connection_is_refused_once_and_closed(frontend, scripted):
    """The client may retry after a second, at another router."""
    engine = scripted("a long answer " * 5, interval=0.01)
    async with frontend(engine) as (app, _), httpx.AsyncClient(base_url=app.url) as kept:
        assert (await kept.get("/health")).status_code == 200
        async with httpx.AsyncClient(base_url=app.url) as other:
            running = asyncio.create_task(other.post("/v1/completions", json=ASK, timeout=20))
            await app.until(lambda: engine.submits)
            async with drained(app):
                await asyncio.sleep(0.05)
                refused = await kept.post("/v1/completions", json=ASK)
                assert refused.status_code == 503
                assert refused.headers["Retry-After"] == "1"
                assert refused.headers["Connection"] == "close"
                with pytest.raises(httpx.ConnectError):
                    await kept.get("/health")
            assert (await running).status_code == 200


async def test_new_requests_are_served_in_the_drain_delay(frontend, scripted):
    async with frontend(scripted(), drain_delay=1.0) as (app, _):
        async with drained(app), httpx.AsyncClient(base_url=app.url) as client:
            health = await client.get("/health")
            assert (health.status_code, health.headers["Connection"]) == (503, "close")
            for _ in range(3):
                served = await client.post("/v1/completions", json=ASK)
                assert (served.status_code, served.headers["Connection"]) == (200, "close")
        async with httpx.AsyncClient(base_url=app.url) as client:
            with pytest.raises(httpx.ConnectError):
                await client.get("/health")


async def test_an_answer_that_is_still_read_is_not_cut(frontend, scripted):
    """The answer exceeds the sockets' buffers; it is read only when nothing else is in progress."""
    engine = scripted(max_model_len=1 << 20)
    async with frontend(engine) as (app, _):
        host, port = app.url.removeprefix("http://").split(":")
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
        small.connect((host, int(port)))
        small.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=small, limit=1024)
        body = json.dumps({"prompt": "x " * 900_000}).encode()
        head = "POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        headers = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        length = int(headers.lower().split(b"content-length: ")[1].split()[0])
        assert length > 6 << 20
        async with drained(app) as ending:
            await asyncio.sleep(1.5)
            assert not ending.done()
            assert len(await asyncio.wait_for(reader.readexactly(length), 20)) == length
        writer.close()
