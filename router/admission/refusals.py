"""Errors for refused requests: why, and when to retry."""

from dataclasses import dataclass

import grpc

from octavo.common import rpc

RETRY_BOUNDS = (1.0, 60.0)
"""Minimum and maximum seconds after which a refused client is to retry."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue, over all models.

    Attributes:
        requests: Maximum requests in it.
        tokens: Maximum tokens of prompts and expected outputs.
        seconds: Longest that one of them waits.
    """

    requests: int
    tokens: int
    seconds: float


def queue_full(limits: QueueLimits, retry_after: float | None) -> rpc.RpcError:
    """RESOURCE_EXHAUSTED: there is no room to wait."""
    return _exhausted(
        f"the queue is full (at most {limits.requests} requests of {limits.tokens} tokens "
        "together wait)",
        retry_after,
    )


def waited(limits: QueueLimits, retry_after: float | None) -> rpc.RpcError:
    """RESOURCE_EXHAUSTED: no engine had room for as long as may be waited."""
    return _exhausted(f"no engine had room for {limits.seconds:g} s", retry_after)


def too_late(wait: float, run: float, left: float) -> rpc.RpcError:
    """RESOURCE_EXHAUSTED: the answer would not be complete by the client's deadline.

    DEADLINE_EXCEEDED, if that has passed already.

    Args:
        wait: Seconds until an engine would have room.
        run: Seconds that it then takes.
        left: Seconds to the deadline.
    """
    if left <= 0:
        return rpc.RpcError(
            grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed before an engine had room"
        )
    return _exhausted(
        f"the deadline in {left:.3g} s cannot be met: the request would start in "
        f"about {wait:.3g} s and take about {run:.3g} s",
        wait + run - left,
    )


def _exhausted(what: str, retry_after: float | None) -> rpc.RpcError:
    low, high = RETRY_BOUNDS
    seconds = round(min(max(retry_after or low, low), high), 1)
    return rpc.exhausted(f"{what}; retry in {seconds:g} s, or add engines", seconds)
