"""The HTTP frontend for OpenAI's own client, with a scripted engine."""

import asyncio
import urllib.error
import urllib.request
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import openai
import pytest

from octavo.common.ports import free_port


@pytest.fixture
def frontend(serve):
    """Start a router with its HTTP frontend; yield its app and an OpenAI client without retries."""

    @asynccontextmanager
    async def start_frontend(*engines, key="none", **settings):
        port = free_port()
        async with AsyncExitStack() as stack:
            app = await stack.enter_async_context(serve(*engines, http_port=port, **settings))
            app.url = f"http://127.0.0.1:{port}"
            # To read the certificate authorities, though no server has TLS, takes 50 ms.
            http = openai.DefaultAsyncHttpxClient(verify=False)
            client = openai.AsyncOpenAI(
                base_url=f"{app.url}/v1", api_key=key, max_retries=0, http_client=http
            )
            await stack.enter_async_context(client)
            await app.up(len(engines))
            yield app, client

    return start_frontend


@pytest.fixture
def hello():
    """A minimal chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def fill(hello):
    """Keep a scripted engine with room for one sequence busy, so that it gets no more requests."""

    async def make_busy(app, client, engine) -> list[asyncio.Task]:
        tasks = [asyncio.create_task(client.chat.completions.create(**hello)) for _ in range(2)]
        await app.until(lambda: len(engine.submits) == 2)
        return tasks

    return make_busy


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes


@pytest.fixture
def get():
    """Send a request with urllib, which adds no retries."""

    def wait(request: urllib.request.Request) -> Response:
        try:
            response = urllib.request.urlopen(request, timeout=20)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            names = {name.lower(): value for name, value in response.headers.items()}
            return Response(response.status, names, response.read())

    async def send(url: str, *, headers=(), data=None) -> Response:
        request = urllib.request.Request(url, headers=dict(headers), data=data)
        return await asyncio.to_thread(wait, request)

    return send


@pytest.fixture
def post(get):
    async def send(url: str, body: bytes, *, kind: str = "application/json") -> Response:
        return await get(url, headers={"Content-Type": kind}, data=body)

    return send
