"""Clients that connect when the process has no file descriptors left."""

import asyncio
import contextlib
import json
import os
import resource
import socket
from pathlib import Path

import structlog

BODY = json.dumps({"prompt": "x", "max_tokens": 5}).encode()
POST = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.contextmanager
def none_left():
    """Use up all file descriptors within a block."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(int(file.name) for file in Path("/proc/self/fd").iterdir()) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    held = []
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        yield
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def answer(client: socket.socket, port: int, request: bytes) -> tuple[bytes, bytes]:
    """Send a request on a socket; return the answer's status and the whole answer."""
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", port))
    await loop.sock_sendall(client, request)
    answered = b""
    async with asyncio.timeout(10):
        while part := await loop.sock_recv(client, 1 << 16):
            answered += part
    return answered[9:12], answered.lower()


async def test_health_is_answered_and_others_are_told_to_retry(frontend, scripted):
    async with frontend(scripted()) as (app, client):
        port = int(app.url.rpartition(":")[2])
        clients = [socket.socket() for _ in range(40)]
        for one in clients:
            one.setblocking(False)
        with none_left():
            for one in clients[:20]:
                status, whole = await answer(one, port, POST)
                assert status == b"503"
                assert b"retry-after: 1\r\n" in whole
                one.shutdown(socket.SHUT_RDWR)
            for one in clients[20:]:
                assert (await answer(one, port, HEALTH))[0] == b"200"
        for one in clients:
            one.close()
        served = await client.completions.create(model="tiny", prompt="x", max_tokens=5)
        assert served.choices[0].text


async def test_too_few_descriptors_for_the_connections_are_told(frontend, scripted):
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most, told in ((limit, True), (1, False)):
        with structlog.testing.capture_logs() as logs:
            async with frontend(scripted(), max_connections=most):
                pass
        warnings = [log for log in logs if log["event"].startswith("fewer file descriptors")]
        assert [log["limit"] for log in warnings] == [limit] * told
