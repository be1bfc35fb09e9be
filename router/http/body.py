"""Reads request bodies, and notices clients that disconnect."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from octavo.common.background import joined
from octavo.router.http.content_coding import CODINGS, CodingError, TooLongError, inflate
from octavo.router.http.errors import ApiError, from_validation

SECONDS = 30.0
"""Seconds that a client has to send the body."""

MAX_SHOWN = 128
"""Maximum characters of a header in an error message."""

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class ClientLeftError(Exception):
    """The client closed its connection."""


async def parse(request: Request, model: type[M], max_bytes: int) -> M:
    """Return a request's JSON as `model`.

    Content-Type must be JSON: browsers send a CORS preflight before they post JSON to another
    origin, so no web page can use a local server without permission.

    Raises:
        ApiError: The body is not such JSON, too long, or too slow to arrive.
        ClientLeftError: The client disconnected.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    coding = _coding(request)
    try:
        async with asyncio.timeout(SECONDS):
            body = await _read(request, max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {SECONDS:g} s") from None
    except ClientDisconnect:
        raise ClientLeftError from None
    if coding is not None:
        body = await asyncio.to_thread(_inflate, body, coding, max_bytes)
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it when the client disconnects.

    Call it after the body has been read.

    Raises:
        ClientLeftError: The client disconnected.
    """
    async with joined(work, names=("http-work",)) as (task,):
        async with joined(_leaving(request), names=("http-leaving",)) as (leaving,):
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()


def _coding(request: Request) -> str | None:
    """Return the body's compression; None if it is not compressed."""
    transfer = _values(request, "transfer-encoding")
    if transfer not in ([], ["chunked"]):
        raise ApiError(
            501, f"Transfer-Encoding must be chunked; got {', '.join(transfer)[:MAX_SHOWN]!r}"
        )
    codings = [name for name in _values(request, "content-encoding") if name != "identity"]
    if not codings:
        return None
    if len(codings) > 1 or codings[0] not in CODINGS:
        raise ApiError(
            415,
            f"Content-Encoding must be one of {', '.join(CODINGS)} or identity; got "
            f"{', '.join(codings)[:MAX_SHOWN]!r}",
            headers={"Accept-Encoding": ", ".join(CODINGS)},
        )
    return codings[0]


def _values(request: Request, name: str) -> list[str]:
    """Return the values of a comma-separated header, in lower case."""
    values = ",".join(request.headers.getlist(name)).lower().split(",")
    return [value.strip() for value in values if value.strip()]


def _inflate(body: bytes, coding: str, max_bytes: int) -> bytes:
    try:
        return inflate(body, coding, max_bytes)
    except TooLongError:
        raise _too_long(max_bytes, ", inflated") from None
    except CodingError as error:
        raise ApiError(
            400, f"the body is not {coding}, as its Content-Encoding claims: {error}"
        ) from None


def _too_long(max_bytes: int, state: str = "") -> ApiError:
    return ApiError(413, f"the body must have at most {max_bytes} bytes{state}")


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_long(max_bytes)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_long(max_bytes)
    return bytes(body)


async def _leaving(request: Request) -> None:
    """Wait until the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
