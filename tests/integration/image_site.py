"""An https server of images that are slow or never end, and `octavo` that fetches from it.

python -m tests.integration.image_site CA serve ... runs `octavo serve ...`. It trusts the authority
CA, and takes this machine's addresses for public ones.
"""

import asyncio
import os
import ssl
import sys
from contextlib import suppress

CHUNK = 1 << 16
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"


async def _drip(writer):
    """Send a byte at a time of a body whose end never comes."""
    writer.write(HEAD + b"Content-Length: 1000000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.1)


async def _drip_headers(writer):
    """Send headers one after another, without an end."""
    writer.write(HEAD)
    while True:
        writer.write(b"X-More: x\r\n")
        await writer.drain()
        await asyncio.sleep(0.1)


async def _send_without_end(writer):
    """Send a body as fast as it is read."""
    writer.write(HEAD + b"\r\n")
    while True:
        writer.write(bytes(CHUNK))
        await writer.drain()


async def _send_in_chunks(writer):
    """Send empty extensions of chunks, which are no body."""
    writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"1;" + b"e" * 100 + b"\r\nx\r\n")
        await writer.drain()
        await asyncio.sleep(0.05)


async def _wait(_):
    await asyncio.sleep(3600)


async def _redirect(writer):
    writer.write(b"HTTP/1.1 302 Found\r\nLocation: /redirect\r\nContent-Length: 0\r\n\r\n")


async def _redirect_slowly(writer):
    await asyncio.sleep(4)
    writer.write(b"HTTP/1.1 302 Found\r\nLocation: /late\r\nContent-Length: 0\r\n\r\n")


WAYS = {
    "/drip": _drip,
    "/headers": _drip_headers,
    "/endless": _send_without_end,
    "/chunks": _send_in_chunks,
    "/never": _wait,
    "/redirect": _redirect,
    "/late": _redirect_slowly,
}
"""What answers each path."""


async def _answer(reader, writer):
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        await WAYS[request.split()[1]](writer)
        await writer.drain()
    writer.close()


def serve(pem, key, port):
    """Serve images on a port of localhost until the process ends."""

    async def run():
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(pem, key)
        server = await asyncio.start_server(_answer, "localhost", port, ssl=context)
        await server.serve_forever()

    asyncio.run(run())


def main():
    """Run `octavo`; see above."""
    from octavo.cli import app
    from octavo.router.images import fetch

    os.environ["SSL_CERT_FILE"] = sys.argv.pop(1)
    fetch.is_public = lambda address: address in {"127.0.0.1", "::1"}
    app()


if __name__ == "__main__":
    main()
