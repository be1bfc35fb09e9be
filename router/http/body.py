"""Reads request bodies, and notices clients that disconnect."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from octavo.common.background import joined
from octavo.router.http.errors import ApiError, from_validation

SECONDS = 30.0
"""Seconds that a client has to send a body."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed its connection; there is nobody to answer."""


async def parse(request: Request, model: type[M], max_bytes: int) -> M:
    """Return a request's JSON as `model`.

    A body must be declared to be JSON: browsers ask before they send that from
    another site's page, so that no page can have a local server work for it.

    Raises:
        ApiError: It is not that, too long, or too slow in coming.
        ClientLeftError: The client has gone.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    try:
        async with asyncio.timeout(SECONDS):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not come in {SECONDS:g} s") from None
    except ClientDisconnect:
        raise ClientLeftError from None
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what `work` returns; cancel it when the client leaves.

    To be called once the body has been read.

    Raises:
        ClientLeftError: It has left.
    """
    async with joined(work, names=("http-work",)) as (task,):
        async with joined(_leaving(request), names=("http-leaving",)) as (leaving,):
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()


async def _read(request: Request, max_bytes: int) -> bytes:
    too_long = ApiError(413, f"the body must have at most {max_bytes} bytes")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise too_long
    return bytes(body)


async def _leaving(request: Request) -> None:
    """Wait until the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
