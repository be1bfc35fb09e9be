"""What a request's headers say to the router."""

import math

from starlette.requests import Request

from octavo.router.http.errors import ApiError
from octavo.router.http.loopback_client import Metadata

FORWARDED = ("authorization", "traceparent", "tracestate")
"""Headers that are the metadata of the gRPC calls, as they stand."""
TIMEOUT = "X-Request-Timeout"
"""Seconds that the client gives its request: OpenAI's API has no word for a deadline."""


def metadata(request: Request) -> Metadata:
    """Returns the metadata of a request's calls.

    Raises:
        ApiError: A header has what metadata cannot hold.
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
    """Returns the seconds that a request has; None where its client sets no limit.

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
