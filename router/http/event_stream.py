"""A response streamed as it is generated, with pings while nothing is due."""

import asyncio
from collections.abc import Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.common.background import joined
from octavo.router.http.body import ClientLeftError, while_connected
from octavo.router.http.calls import Calls, Generate
from octavo.router.http.errors import ApiError


class EventStream(Response):
    """A response streamed as it is generated; a client's disconnect cancels its calls.

    Proxies close silent connections, so after `ping_interval` idle seconds the server sends the
    headers and a ping. An error is an ordinary HTTP error before the headers are sent, and the
    stream's last event afterwards.
    """

    def __init__(
        self,
        request: Request,
        answer: Calls,
        generate: Generate,
        headers: Mapping[str, str],
        ping_interval: float,
    ) -> None:
        self._request = request
        self._answer = answer
        self._generate = generate
        self._ping_interval = ping_interval
        super().__init__(
            media_type=answer.media_type,
            headers={
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # else nginx buffers the stream
                "X-Request-Id": answer.id,
                **headers,
            },
        )
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send the response."""
        body = _Body(self, send)
        try:
            await while_connected(self._request, self._stream(body))
        except ApiError as error:
            if not body.started:
                await error.response(scope)(scope, receive, send)
                return
            await body.send(self._answer.failure(error))
        except ClientLeftError:
            return
        await send({"type": "http.response.body"})

    async def _stream(self, body: "_Body") -> None:
        async with joined(self._ping(body), names=("http-ping",)):
            await self._answer.stream(self._generate, body.send)

    async def _ping(self, body: "_Body") -> None:
        """Send a ping after each interval without data."""
        while True:
            if await body.idle(self._ping_interval):
                await body.send(self._answer.ping)


class _Body:
    """The body of a stream; each part is sent whole.

    Attributes:
        started: Whether the headers were sent.
    """

    def __init__(self, response: Response, send: Send) -> None:
        self.started = False
        self._response = response
        self._send = send
        self._sending = asyncio.Lock()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    async def send(self, part: bytes) -> None:
        """Send the next part, preceded by the headers if it is the first."""
        async with self._sending:
            if not self.started:
                self.started = True
                start = {
                    "status": self._response.status_code,
                    "headers": self._response.raw_headers,
                }
                await self._send({"type": "http.response.start", **start})
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
            self._last = self._loop.time()

    async def idle(self, interval: float) -> bool:
        """Wait for `interval` seconds after the last part; return whether none followed."""
        await asyncio.sleep(self._last + interval - self._loop.time())
        return self._loop.time() >= self._last + interval
