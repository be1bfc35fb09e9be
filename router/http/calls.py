"""The Generate calls behind one HTTP request."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from pydantic_core import to_json

from octavo.client import GenerateOptions, InvalidArgumentError, Prompt
from octavo.client.requests import generate_request
from octavo.common import rpc
from octavo.common.background import joined
from octavo.router.generate import Write
from octavo.router.http.errors import ApiError, from_client, from_rpc, named
from octavo.v1.generation_pb2 import GenerateRequest

Generate = Callable[[GenerateRequest, Write], Coroutine[Any, Any, None]]
"""Runs one Generate call for the HTTP request's tenant; `Write` receives the responses."""
FindUnenforced = Callable[[GenerateRequest], Awaitable[Sequence[str]]]
"""Returns the parts of a request's schemas that are not enforced."""
Send = Callable[[bytes], Awaitable[None]]
"""Sends a part of the response body."""


class GeneratingBody(Protocol):
    """The body of a request that generates, in the form of its API."""

    @property
    def stream(self) -> bool | None:
        """Whether the response is streamed."""

    @property
    def request_id(self) -> str | None:
        """The client's own id, if any."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts, in order."""

    @property
    def params(self) -> Mapping[str, str]:
        """HTTP names of GenerateRequest fields, where they differ from the usual."""

    def options(self) -> GenerateOptions:
        """Return the arguments as options of the client's `generate`."""

    def ignored(self) -> list[str]:
        """Return the names of ignored members."""


class Calls:
    """The Generate calls of one HTTP request, one per prompt.

    Args:
        request: The body of the HTTP request.
        id_prefix: Prefix of the response's id.
        request_id: Id of the HTTP request.

    Attributes:
        id: Response id, from the body's `request_id` or else the HTTP request's; logs and traces
            use it.
        media_type: Type of a streamed response.
        unenforced: Parts of schemas that are not enforced, by their HTTP names.

    Raises:
        ApiError: An argument has the wrong type.
    """

    media_type = "text/event-stream"

    @property
    def ping(self) -> bytes:
        """What a stream sends while it has nothing to say: a comment, which clients ignore."""
        return b": ping\n\n"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response besides the usual."""
        return {}

    def __init__(self, request: GeneratingBody, id_prefix: str, request_id: str) -> None:
        self.id = id_prefix + (request.request_id or request_id)
        self.unenforced: Sequence[str] = ()
        self._params = request.params
        self._messages = self._make_messages(request)

    async def find_unenforced(self, find: FindUnenforced) -> None:
        """Set `unenforced`, before the response starts."""
        for place in await find(self._messages[0]):
            field, mark, pointer = place.partition("#")
            self.unenforced = [*self.unenforced, f"{named(field, self._params)}{mark}{pointer}"]

    async def whole(self, generate: Generate) -> dict[str, Any]:
        """Return the complete response.

        Raises:
            ApiError: A call failed.
        """
        raise NotImplementedError

    async def stream(self, generate: Generate, send: Send) -> None:
        """Send the response as server-sent events.

        Raises:
            ApiError: A call failed.
        """
        raise NotImplementedError

    def failure(self, error: ApiError) -> bytes:
        """Return the last event of a stream that failed."""
        return event(error.body)

    async def _run(self, generate: Generate, writes: Sequence[Write]) -> None:
        """Run all calls concurrently; if one fails, cancel the others."""
        calls = list(map(generate, self._messages, writes))
        try:
            if len(calls) == 1:
                await calls[0]
                return
            async with joined(*calls, expected=(rpc.RpcError,)) as tasks:
                await asyncio.gather(*tasks)
        except rpc.RpcError as error:
            raise from_rpc(error, self._params) from None

    def _make_messages(self, request: GeneratingBody) -> list[GenerateRequest]:
        """Return the requests to generate, one per prompt."""
        prompts, options = request.prompts, request.options()
        messages = []
        for i, prompt in enumerate(prompts):
            options["request_id"] = self.id if len(prompts) == 1 else f"{self.id}-{i}"
            try:
                messages.append(generate_request(prompt, options))
            except InvalidArgumentError as error:
                raise from_client(error, self._params) from None
        return messages


def event(body: dict[str, Any], name: str = "") -> bytes:
    """Return one server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + to_json(body) + b"\n\n"
