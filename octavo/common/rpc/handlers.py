"""Call handlers: authenticate, run, and return a status for every failure."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health
from grpc_status import rpc_status

from octavo.common.rpc.errors import RpcError
from octavo.common.rpc.peer_limit import PeerLimit

log = structlog.get_logger(__name__)

UNEXPECTED = "an unexpected error; the server's log has the details"
"""Message of errors other than `RpcError`."""
HEALTH = f"/{health.SERVICE_NAME}/"
"""Start of the paths of health checks, which no limit refuses."""


Context = grpc.aio.ServicerContext[Any, Any]
"""The context of a call."""


async def abort(context: Context, error: RpcError) -> NoReturn:
    """End the call with `error` and its details.

    Raises:
        grpc.aio.AbortError: Exception by which gRPC ends the handler.
        asyncio.CancelledError: The client has disconnected.
    """
    with _cancelled_if_over():
        await context.abort_with_status(rpc_status.to_status(error.to_status()))
    raise AssertionError("gRPC aborts by an exception")


async def write(context: Context, response: Message) -> None:
    """Send a response of a stream.

    Raises:
        asyncio.CancelledError: The client has disconnected.
    """
    try:  # not `_cancelled_if_over`: too slow per token
        await context.write(response)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


@contextmanager
def _cancelled_if_over() -> Iterator[None]:
    """Turn gRPC's InternalError about an ended call into a cancellation.

    gRPC raises it if the client has disconnected, but the handler writes before it is cancelled.
    """
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


Guard = Callable[[str, Context], None]


class _Unparsable:
    """Stands for a request whose bytes cannot be parsed."""

    __slots__ = ("error",)

    def __init__(self, error: RpcError) -> None:
        self.error = error


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Turns every failure of a call into a status.

    gRPC itself returns INTERNAL for an invalid message, and UNKNOWN with the exception's text if a
    handler raises. Here an invalid message becomes INVALID_ARGUMENT, an `RpcError` its own status,
    and any other exception is logged and becomes INTERNAL without details.

    Args:
        guard: Called before each handler with the method's path and the call's context; may raise
            `RpcError`.
        max_calls_per_peer: Maximum calls of an address in progress, except health checks; 0:
            unlimited.
    """

    def __init__(self, guard: Guard | None = None, max_calls_per_peer: int = 0) -> None:
        self._guard = guard
        self._calls = PeerLimit(max_calls_per_peer)
        self._handlers: dict[str, Any] = {}  # made once, by method

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - the stubs do not allow None
        """Return a method's handler, wrapped if it is of asyncio; None if there is none."""
        method = handler_call_details.method
        if (made := self._handlers.get(method)) is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None
            made = self._handlers[method] = self._wrapped(handler, method)
        return made

    def _wrapped(self, handler: "grpc.RpcMethodHandler[Any, Any]", method: str) -> Any:  # noqa: ANN401
        streaming = bool(handler.request_streaming)
        requests = "stream" if streaming else "unary"
        kind = f"{requests}_{'stream' if handler.response_streaming else 'unary'}"
        wrapped = _wrap(getattr(handler, kind), streaming, method, self._admitted)
        if wrapped is None:
            return handler
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrapped, _safely(handler.request_deserializer), handler.response_serializer)

    @contextmanager
    def _admitted(self, method: str, context: Context) -> Iterator[None]:
        """Check a call, and count it while it runs."""
        if self._guard is not None:
            self._guard(method, context)
        if method.startswith(HEALTH):
            yield
            return
        with self._calls.counted(_address(context.peer())):
            yield


def _address(peer: str) -> str:
    """Return gRPC's name of a peer, without its port."""
    return peer.rpartition(":")[0] if peer.startswith(("ipv4:", "ipv6:")) else peer


def _wrap(
    function: Callable[..., Any],
    streaming: bool,
    method: str,
    admitted: Callable[[str, Context], AbstractContextManager[None]],
) -> Callable[..., Any] | None:
    """Return `function` with exceptions turned into statuses; None if it is synchronous."""

    def checked(request: Any) -> Any:  # noqa: ANN401 - a message or an iterator of them
        if streaming:
            return _parsed(request)
        if isinstance(request, _Unparsable):
            raise request.error
        return request

    async def call(request: Any, context: Context) -> Any:  # noqa: ANN401
        try:
            with admitted(method, context):
                return await function(checked(request), context)
        except Exception as error:  # noqa: BLE001 - answered below
            request = None  # see `_forget`
            await _answer(context, error, method)

    async def iterate(
        request: Any,  # noqa: ANN401
        context: Context,
    ) -> None:
        try:
            with admitted(method, context):
                async with aclosing(function(checked(request), context)) as responses:
                    async for response in responses:
                        await write(context, response)
        except Exception as error:  # noqa: BLE001 - answered below
            request = None  # see `_forget`
            await _answer(context, error, method)

    if inspect.isasyncgenfunction(function):
        return iterate
    return call if inspect.iscoroutinefunction(function) else None


async def _parsed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Unparsable):
            raise request.error
        yield request


async def _answer(context: Context, error: Exception, method: str) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):  # the handler has already returned
        raise error
    if isinstance(error, grpc.aio.InternalError):  # the call has ended
        raise asyncio.CancelledError from error
    if not isinstance(error, RpcError):
        log.error("handler failed", method=method, exc_info=error)
        error = RpcError(grpc.StatusCode.INTERNAL, UNEXPECTED)
    _forget(error)
    await abort(context, error)


def _forget(error: RpcError) -> None:
    """Clear an error's traceback, and with it its references to the request.

    gRPC keeps a call's exception in a reference cycle, so a refused request would stay in memory
    until the next garbage collection.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _safely(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a deserializer that returns `_Unparsable` for invalid bytes."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:  # noqa: ANN401 - a message or _Unparsable
        try:
            return deserialize(data)
        except DecodeError:
            # Generated code passes FromString, which is bound to the message's class.
            name = getattr(getattr(deserialize, "__self__", None), "__name__", "message")
            why = "it does not parse, or a string in it is not UTF-8"
            message = f"the message is not a valid protobuf {name}: {why}"
            return _Unparsable(RpcError(grpc.StatusCode.INVALID_ARGUMENT, message))

    return parse
