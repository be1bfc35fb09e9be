"""Limits the calls in progress per client address."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health

from octavo.common import rpc

RETRY_SECONDS = 1.0
"""Retry delay of refused calls in seconds, as the end of other calls is unknown."""


def limit_calls(limit: int) -> list[grpc.aio.ServerInterceptor]:
    """Return the interceptors that limit each address to `most` calls; none for 0."""
    return [PeerLimit(limit)] if limit else []


class PeerLimit(grpc.aio.ServerInterceptor):
    """Refuse an address's calls beyond `most` in progress, except health checks."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - the stubs do not allow None
        """Wrap an asyncio handler."""
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(f"/{health.SERVICE_NAME}/"):
            return handler
        function = rpc.behaviour(handler)

        async def call(request: Any, context: rpc.Context) -> Any:  # noqa: ANN401
            with self._counted(context):
                return await function(request, context)

        async def iterate(request: Any, context: rpc.Context) -> AsyncIterator[Any]:  # noqa: ANN401
            with self._counted(context):
                async for response in function(request, context):
                    yield response

        if isasyncgenfunction(function):
            return rpc.with_behaviour(handler, iterate, handler.request_deserializer)
        if iscoroutinefunction(function):
            return rpc.with_behaviour(handler, call, handler.request_deserializer)
        return handler

    @contextmanager
    def _counted(self, context: rpc.Context) -> Iterator[None]:
        address = _address(context.peer())
        if self._calls[address] >= self._limit:
            raise rpc.exhausted(
                f"{self._limit} calls of {address} are in progress, the maximum per address "
                "(--max-calls-per-peer); retry when one has ended",
                RETRY_SECONDS,
            )
        self._calls[address] += 1
        try:
            yield
        finally:
            self._calls[address] -= 1
            if not self._calls[address]:
                del self._calls[address]


def _address(peer: str) -> str:
    """Return gRPC's name of a peer, without its port."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer
