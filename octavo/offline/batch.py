"""Runs a batch's requests through an HTTP API such as OpenAI's, in order and in flat memory."""

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from http import HTTPStatus
from typing import Any
from uuid import uuid4

import httpx2

from octavo.common.background import start
from octavo.common.sampling_parameters import MAX_PRIORITY
from octavo.offline.batch_files import BatchFiles, custom_id
from octavo.offline.in_order import in_order

BUSY = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})
RETRY_SECONDS = 1.0
"""Wait before a retry, if the server names none or is not there."""
MAX_TRIES = 60
"""Maximum attempts of a request whose connection fails or whose body comes too late."""

Result = dict[str, Any]


class Batch:
    """A batch in progress.

    Args:
        client: HTTP client, whose base URL is the server's.
        in_flight: Maximum number of requests at once.
        priority: Priority of requests that name none; None leaves it to the server.
        lowest: Whether all requests have the lowest priority.
        endpoint: Path of all requests; None: each has its own.
    """

    def __init__(
        self,
        client: httpx2.AsyncClient,
        in_flight: int,
        priority: int | None = None,
        *,
        lowest: bool = False,
        endpoint: str | None = None,
    ) -> None:
        self._client = client
        self._in_flight = in_flight
        self._defaults = {} if priority is None else {"priority": priority}
        self._fixed = {"priority": -MAX_PRIORITY} if lowest else {}
        self._endpoint = endpoint
        self._places = asyncio.Semaphore(in_flight)

    async def run(self, files: BatchFiles, on_result: Callable[[Result], None]) -> None:
        """Run the requests that are not done.

        Args:
            files: The requests and their results.
            on_result: Called with each result once it is written.

        Raises:
            TransportError: The server has not answered for long; a later run can go on.
        """
        started = (start(self._complete(line), "batch-request") for line in files.requests())
        with closing(in_order(started, self._in_flight)) as tasks:
            for task in tasks:
                result = await task
                files.write(result)
                on_result(result)

    async def _complete(self, line: bytes) -> Result:
        result: Result = {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": custom_id(line),
            "response": None,
            "error": None,
        }
        try:
            url, body = read_request(line, self._endpoint)
        except ValueError as error:
            return result | {"error": {"code": "invalid_request", "message": str(error)}}
        body = {**self._defaults, **body, **self._fixed}
        async with self._places:
            response = await self._post(url, body)
        try:
            answer = response.json()
        except ValueError:
            answer = response.text
        return result | {
            "response": {
                "status_code": response.status_code,
                "request_id": response.headers.get("x-request-id", ""),
                "body": answer,
            }
        }

    async def _post(self, url: str, body: dict[str, Any]) -> httpx2.Response:
        """Send a request, again while the server is busy.

        Raises:
            TransportError: The server has not answered for long.
        """
        tries = 0
        while True:
            try:
                response = await self._client.post(url, json=body)
            except httpx2.TransportError:
                tries += 1
                if tries == MAX_TRIES:
                    raise
                await asyncio.sleep(RETRY_SECONDS)
                continue
            late = response.status_code == HTTPStatus.REQUEST_TIMEOUT  # a machine that was paused
            tries += late
            if not (response.status_code in BUSY or (late and tries < MAX_TRIES)):
                return response
            wait = response.headers.get("retry-after", "")
            await asyncio.sleep(int(wait) if wait.isdecimal() else RETRY_SECONDS)


def read_request(line: bytes, endpoint: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request.

    Raises:
        ValueError: The line is no request, asks for a stream, or is for another path than
            `endpoint`.
    """
    try:
        request = json.loads(line)
    except ValueError as error:
        raise ValueError(f"the line is not JSON: {error}") from None
    match request:
        case {"method": str(method)} if method != "POST":
            raise ValueError("method must be POST")
        case {"body": {"stream": stream}} if stream:
            raise ValueError("body.stream must be false")
        case {"url": str(url)} if endpoint is not None and url != endpoint:
            raise ValueError(f"url must be {endpoint}, the batch's endpoint")
        case {"url": str(url), "body": dict(body)} if url.startswith("/v1/"):
            return url, body
    raise ValueError("url must be a path such as /v1/chat/completions, and body an object")
