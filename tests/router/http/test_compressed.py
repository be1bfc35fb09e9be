"""Compressed request bodies."""

import asyncio
import gzip
import json
import tracemalloc
import zlib
from urllib.parse import urlsplit

import pytest
import zstandard

from octavo.router.http.content_coding import CODINGS, CodingError, TooLongError, inflate


def raw_deflate(body: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(body) + stream.flush()


COMPRESS = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstandard.compress}
LIMIT = 64 << 10


@pytest.fixture
def ask(get, hello):
    async def send(app, encode=None, **headers):
        body = json.dumps(hello).encode()
        names = {"Content-Type": "application/json"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        data = body if encode is None else encode(body)
        return await get(f"{app.url}/v1/chat/completions", headers=names.items(), data=data)

    return send


async def test_compressed_bodies_are_read(frontend, scripted, ask):
    async with frontend(scripted("a")) as (app, _):
        plain = json.loads((await ask(app)).body)["usage"]
        for name, encode in [*COMPRESS.items(), ("deflate", raw_deflate), ("GZip", gzip.compress)]:
            response = await ask(app, encode, Content_Encoding=name)
            assert json.loads(response.body)["usage"]["prompt_tokens"] == plain["prompt_tokens"]
        assert (await ask(app, Content_Encoding="identity")).status == 200


async def test_contradictions_and_other_codings_are_refused(frontend, scripted, ask):
    async with frontend(scripted("a"), max_message_bytes=LIMIT) as (app, _):
        for name, encode in COMPRESS.items():
            plain = await ask(app, Content_Encoding=name)
            assert (plain.status, f"not {name}" in plain.body.decode()) == (400, True)
            bomb = await ask(app, lambda _, encode=encode: encode(bytes(LIMIT + 1)),
                             Content_Encoding=name)  # fmt: skip
            assert bomb.status == 413
        for name in ("br", "gzip, gzip", "compress"):
            other = await ask(app, Content_Encoding=name)
            assert (other.status, name in other.body.decode()) == (415, True)
            assert other.headers["accept-encoding"] == "gzip, deflate, zstd"
        assert b" 501 " in await answer_to_head(app.url, "Transfer-Encoding: gzip, chunked")


async def answer_to_head(url, header):
    """Read only the status line: the server may close the connection before the whole body."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    lines = f"Host: {address.netloc}", "Content-Type: application/json", header
    writer.write("\r\n".join(["POST /v1/chat/completions HTTP/1.1", *lines, "", ""]).encode())
    try:
        return await reader.readline()
    finally:
        writer.close()


@pytest.mark.parametrize("coding", CODINGS)
def test_a_bomb_takes_no_more_than_the_limit(coding):
    bomb = COMPRESS[coding](bytes(256 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(TooLongError):
            inflate(bomb, coding, LIMIT)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("coding", CODINGS)
def test_only_one_whole_stream_is_taken(coding):
    whole = COMPRESS[coding](b"{}" * 100)
    assert inflate(whole, coding, 200) == b"{}" * 100
    for wrong in (b"", b"{", whole[:-1], whole + b"x", whole + whole, whole + bytes(200)):
        with pytest.raises(CodingError):
            inflate(wrong, coding, 200)
    with pytest.raises(TooLongError):
        inflate(whole, coding, 199)
