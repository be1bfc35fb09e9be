"""The headers of HTTP requests that the router reads."""

import math

from starlette.requests import Request

from octavo.router.http.errors import ApiError

FORWARDED = ("authorization", "traceparent", "tracestate")
"""Headers that have the meaning of gRPC metadata of the same name."""
TIMEOUT = "X-Request-Timeout"
"""Seconds until the client gives up: OpenAI's API has no parameter for a deadline."""

Metadata = tuple[tuple[str, str], ...]


def metadata(request: Request) -> Metadata:
    """Return the metadata of a request's calls.

    Raises:
        ApiError: A header is not printable ASCII.
    """
    found = []
    for name in FORWARDED:
        value = request.headers.get(name)
        if value is None:
            continue
        if not (value.isascii() and value.isprintable()):
            raise ApiError(400, f"the header {name} must be printable ASCII")
        found.append((name, value))
    return tuple(found)


def timeout(request: Request) -> float | None:
    """Return the seconds until the client gives up; None for never.

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
