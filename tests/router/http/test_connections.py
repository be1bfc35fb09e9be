"""Unauthenticated clients' connections, and the service that remains for others."""

import asyncio
import gc
import json
import random
import re
from contextlib import asynccontextmanager

import pytest
from structlog.testing import capture_logs
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from octavo.router.http import connection
from octavo.router.tenants.tenant import hash_key

HALF = b"GET /health HTTP/1.1\r\nHost: x\r\nX-Half: "
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HERE = ("ip:127.0.0.1",)


def completion(*, chunked: bool = False, close: bool = False, key: str = "none") -> bytes:
    data = json.dumps({"prompt": "\r\n\r\n", "max_tokens": 2}, indent="\r\n\r\n").encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {key}\r\n".encode()
    head += b"Connection: close\r\n" * close
    if not chunked:
        return head + b"Content-Length: %d\r\n\r\n" % len(data) + data
    chunks = [data[i : i + 7] for i in range(0, len(data), 7)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + body + b"0\r\nX-Trailer: 1\r\n\r\n"


@pytest.fixture
def connect():
    """Opens connections, and closes them at the end."""

    @asynccontextmanager
    async def open_connections(app):
        host, port = app.url.removeprefix("http://").split(":")
        writers = []

        async def one(data: bytes = b"", **options):
            reader, writer = await asyncio.open_connection(host, int(port), **options)
            writers.append(writer)
            writer.write(data)
            return reader, writer

        try:
            yield one
        finally:
            for writer in writers:
                writer.transport.abort()

    return open_connections


async def rest(reader) -> bytes:
    """Return all bytes until the connection is closed in any way."""
    received = b""
    try:
        while data := await asyncio.wait_for(reader.read(1 << 16), 20):
            received += data
    except ConnectionError:
        pass
    return received


async def answered(reader) -> bytes:
    """Read the next response; return its status line."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    length = re.search(rb"content-length: (\d+)", head)
    await reader.readexactly(int(length[1]))
    return head.partition(b"\r\n")[0]


async def test_half_sent_headers_do_not_exhaust_connections(frontend, scripted, hello, connect):
    async with (
        frontend(scripted("abc"), max_connections=10) as (app, client),
        connect(app) as one,
    ):
        readers = [(await one(HALF))[0] for _ in range(40)]
        for _ in range(3):
            assert (await client.chat.completions.create(**hello)).choices
        ended = [reader for reader in readers if reader.at_eof() or reader.exception()]
        assert len(ended) >= 30
        assert readers[-1] not in ended


async def test_a_header_has_a_deadline(frontend, scripted, connect, monkeypatch):
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
    async with frontend(scripted("a")) as (app, _), connect(app) as one:
        readers = [(await one(data))[0] for data in (b"", HALF)]
        reader, writer = await one(HEALTH)
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        writer.write(HALF)
        silent, half, second = [await rest(r) for r in (*readers, reader)]
        assert silent == b""
        assert half.startswith(b"HTTP/1.1 408 ")
        assert second.startswith(b"HTTP/1.1 408 ")


async def test_a_header_has_a_size(frontend, scripted, connect):
    async with (
        frontend(scripted("a"), max_metadata_bytes=4096) as (app, _),
        connect(app) as one,
    ):
        for long in (b"x" * 5000, b"x" * 200_000 + b"\r\n\r\n", b"\r\nX: y" * 2000):
            reader, _ = await one(HALF + long)
            assert (await rest(reader)).startswith((b"HTTP/1.1 431 ", b""))
        reader, _ = await one(HALF + b"x" * 3900 + b"\r\n\r\n")
        assert await answered(reader) == b"HTTP/1.1 200 OK"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HALF, 408),
        (HALF + b"x" * 5000, 431),
        (HALF + b"x" * 5000 + b"\r\n\r\n", 431),
        (HALF + b"x\r\nno colon\r\n\r\n", 400),
        (HEALTH + b"\0 no HTTP", 400),
    ],
)
@pytest.mark.parametrize("given", ["mine", "not mine"])
async def test_what_is_refused_unparsed_has_an_id_and_is_logged(
    frontend, scripted, connect, monkeypatch, *, sent, status, given
):
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
    own = f"Host: x\r\nX-Request-Id: {given}\r\n".encode()
    first, _, last = sent.rpartition(b"Host: x\r\n")
    async with (
        frontend(scripted("a"), max_metadata_bytes=4096) as (app, _),
        connect(app) as one,
    ):
        with capture_logs() as logs:
            reader, _ = await one(first + own + last)
            head, _, body = (await rest(reader)).rpartition(b"\r\n\r\n")
    head = head[head.rindex(b"HTTP/1.1 ") :].decode().lower()
    assert head.startswith(f"http/1.1 {status} ")
    assert "content-type: application/json\r\n" in head
    assert json.loads(body)["error"]["type"] == "invalid_request_error"
    request_id = re.search(r"x-request-id: (\S+)", head)[1]
    carried = given == "mine" and sent.startswith(HALF)  # not the previous request's
    assert re.fullmatch("mine" if carried else "[0-9a-f]{32}", request_id)
    (line,) = [log for log in logs if log["event"] == "request refused unparsed"]
    assert (line["status"], line["http_request_id"]) == (status, request_id)
    assert line["reason"] == json.loads(body)["error"]["message"]


async def test_an_endless_header_is_not_buffered(frontend, scripted, connect):
    async with frontend(scripted("a")) as (app, _), connect(app) as one:
        _, writer = await one(HALF)

        async def send_until_closed():
            for _ in range(1000):
                writer.write(b"x" * (1 << 16))
                await writer.drain()

        with pytest.raises(ConnectionError):
            await send_until_closed()


async def test_requests_on_one_connection_are_parsed_one_by_one(frontend, scripted, connect):
    def parsed():
        return sum(type(o) is RequestResponseCycle for o in gc.get_objects())

    async with frontend(scripted("a")) as (app, client), connect(app) as one:
        gc.collect()
        before = parsed()  # other tests'
        reader, _ = await one(HEALTH * 80 + HALF)
        assert await answered(reader) == b"HTTP/1.1 200 OK"
        assert parsed() - before < 10
        for _ in range(79):
            assert await answered(reader) == b"HTTP/1.1 200 OK"
        assert await client.models.list()


async def test_a_client_that_pipelines_without_end_is_disconnected(frontend, scripted, connect):
    async with frontend(scripted("a")) as (app, _), connect(app) as one:
        reader, _ = await one(HEALTH * 100_000)
        assert len(await rest(reader)) < 1 << 20


@pytest.mark.parametrize("chunked", [False, True])
async def test_requests_may_arrive_in_any_pieces(frontend, scripted, connect, chunked):
    """Also pipelined requests: the second is sent before the first is answered."""
    data = completion(chunked=chunked) + HEALTH + completion(chunked=chunked, close=True)
    rng = random.Random(0)
    async with frontend(scripted("ab")) as (app, _), connect(app) as one:
        cuts = [[], range(1, len(data)), *(rng.sample(range(1, len(data)), 9) for _ in range(20))]
        for cut in map(sorted, cuts):
            reader, writer = await one()
            for start, end in zip([0, *cut], [*cut, len(data)], strict=True):
                writer.write(data[start:end])
                await asyncio.sleep(0)
            received = await rest(reader)
            assert received.count(b"HTTP/1.1 200 OK") == 3
            assert received.count(b'"text":"ab"') == 2


async def test_the_rest_of_a_refused_body_has_a_deadline(
    frontend, scripted, connect, tmp_path, monkeypatch
):
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.3)
    file = tmp_path / "tenants.toml"
    file.write_text(f'[alice]\nkeys = ["{hash_key("alice-key")}"]\n')
    async with frontend(scripted("ab"), tenants=file) as (app, _), connect(app) as one:
        trickled = completion().replace(b"Content-Length: ", b"Content-Length: 1")
        reader, writer = await one(trickled)
        assert await answered(reader) == b"HTTP/1.1 401 Unauthorized"
        closed = asyncio.create_task(rest(reader))
        while not closed.done():
            writer.write(b" ")
            await asyncio.sleep(0.05)
        assert await closed == b""
        for chunked in (False, True):
            whole = completion(chunked=chunked)
            reader, writer = await one(whole[:-20])
            assert await answered(reader) == b"HTTP/1.1 401 Unauthorized"
            writer.write(whole[-20:] + completion(chunked=chunked, key="alice-key"))
            assert await answered(reader) == b"HTTP/1.1 200 OK"


async def test_connections_per_address_are_limited(frontend, scripted, connect):
    async with (
        frontend(scripted("a"), max_connections_per_peer=3) as (app, _),
        connect(app) as one,
    ):
        first, second, third, fourth = [(await one(HALF))[0] for _ in range(4)]
        assert await rest(first) == b""
        fifth, _ = await one(HEALTH)
        assert await answered(fifth) == b"HTTP/1.1 200 OK"
        assert await rest(second) == b""
        assert not third.at_eof()
        assert not fourth.at_eof()


async def test_unfinished_handshakes_do_not_exhaust_places(frontend, scripted, connect, authority):
    cert, key = authority.issue("server", *HERE)
    trusted = authority.client_context()
    settings = {"tls_cert": cert, "tls_key": key, "max_connections": 10}
    async with frontend(scripted("a"), **settings) as (app, _), connect(app) as one:
        for hello in (b"", b"\x16\x03\x01"):
            for _ in range(20):
                await one(hello)
            reader, _ = await one(HEALTH, ssl=trusted)
            assert await answered(reader) == b"HTTP/1.1 200 OK"


async def test_a_handshake_has_a_deadline(frontend, scripted, connect, authority, monkeypatch):
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.3)
    cert, key = authority.issue("server", *HERE)
    async with (
        frontend(scripted("a"), tls_cert=cert, tls_key=key) as (app, _),
        connect(app) as one,
    ):
        for start in (b"", b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n"):
            reader, _ = await one(start)
            assert b"HTTP" not in await rest(reader)
        trusted = authority.client_context()
        reader, _ = await one(HALF, ssl=trusted)
        assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")
