"""Waits for requests in the order of their start, with a bounded number taken ahead."""

import asyncio
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

AHEAD = 4
"""Requests that are taken before their turn, as a multiple of those in flight: results are in
order, and a long output must not keep others from starting."""

F = TypeVar("F", bound=Future[Any] | asyncio.Future[Any])


def in_order(started: Iterable[F], in_flight: int) -> Generator[F, None, None]:
    """Yield requests in order, for the caller to wait for; closing it cancels the others.

    Args:
        started: Starts a request with each step.
        in_flight: Maximum number of requests at once, which the requests themselves keep.
    """
    left: deque[F] = deque()
    try:
        for request in started:
            left.append(request)
            if len(left) >= AHEAD * in_flight:
                yield left.popleft()
        while left:
            yield left.popleft()
    finally:
        for request in left:
            request.cancel()
