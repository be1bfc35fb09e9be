"""Errors for refused requests, with the reason and the retry delay."""

from dataclasses import dataclass

import grpc

from octavo.common import rpc

RETRY_BOUNDS = (1.0, 60.0)
"""Minimum and maximum retry delay of a refused client, in seconds."""


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue, shared by all models.

    Attributes:
        requests: Maximum number of waiting requests.
        tokens: Maximum total tokens of prompts and expected outputs.
        seconds: Maximum wait of a request.
    """

    requests: int
    tokens: int
    seconds: float


def queue_full(limits: QueueLimits, retry_after: float | None) -> rpc.RpcError:
    """RESOURCE_EXHAUSTED: the queue is full."""
    return _exhausted(
        f"the queue is full (at most {limits.requests} requests of {limits.tokens} tokens "
        "together wait)",
        retry_after,
    )


def waited(limits: QueueLimits, retry_after: float | None) -> rpc.RpcError:
    """RESOURCE_EXHAUSTED: no engine had room within the queue's maximum wait."""
    return _exhausted(f"no engine had room for {limits.seconds:g} s", retry_after)


def too_late(wait: float, run: float, left: float) -> rpc.RpcError:
    """RESOURCE_EXHAUSTED: the deadline would be missed; DEADLINE_EXCEEDED: it has passed.

    Args:
        wait: Expected seconds until an engine has room.
        run: Expected seconds on the engine.
        left: Seconds until the deadline.
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
