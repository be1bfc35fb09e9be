"""The request headers that the router reads."""

import math
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bind_contextvars

from octavo.router.http.errors import ApiError

FORWARDED = ("authorization", "traceparent", "tracestate")
"""Headers with the meaning of the gRPC metadata of the same name."""
KEY = "x-api-key"
"""Header with the API key in Anthropic's API; `Authorization` wins."""
TIMEOUT = "X-Request-Timeout"
"""Header with the client's timeout in seconds; OpenAI's API has no parameter for it."""

REQUEST_ID = "X-Request-Id"
"""Header with the request's id, from the client or the server; errors and log lines have it too."""

_WELL_FORMED = re.compile(r"[!-~]{1,100}")

Metadata = tuple[tuple[str, str], ...]


def metadata(request: Request) -> Metadata:
    """Return the gRPC metadata of a request's calls.

    Raises:
        ApiError: A header is not printable ASCII.
    """
    pairs = []
    for name in FORWARDED:
        value = request.headers.get(name)
        if value is None and name == "authorization" and (key := request.headers.get(KEY)):
            value = f"Bearer {key}"
        if value is None:
            continue
        if not (value.isascii() and value.isprintable()):
            raise ApiError(400, f"the header {name} must be printable ASCII")
        pairs.append((name, value))
    return tuple(pairs)


def timeout(request: Request) -> float | None:
    """Return the client's timeout in seconds; None if it has none.

    Raises:
        ApiError: The header is not a positive number.
    """
    text = request.headers.get(TIMEOUT)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ApiError(400, f"the header {TIMEOUT} must be a number of seconds above 0")
    return seconds


def own_id(headers: Headers) -> str | None:
    """Return the client's request id, if it is well-formed."""
    client_id = headers.get(REQUEST_ID, "")
    return client_id if _WELL_FORMED.fullmatch(client_id) else None


def new_id() -> str:
    """Return a new id for a request without one."""
    return uuid.uuid4().hex


class RequestIds:
    """ASGI middleware that gives each request an id, for its response and log lines.

    A client's own id is kept. Otherwise an endpoint may set the response's id; errors have the
    server's.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        client_id = own_id(Headers(scope=scope))
        request_id = client_id or new_id()
        scope.setdefault("state", {})["request_id"] = request_id
        bind_contextvars(http_request_id=request_id)  # bound in this request's task only

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if client_id or REQUEST_ID not in headers:
                    headers[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)
