"""Handlers of calls: authenticate, run, and answer every failure with a status."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message
from grpc_status import rpc_status

from octavo.common.rpc.errors import RpcError

log = structlog.get_logger(__name__)

UNEXPECTED = "an unexpected error; the server's log has the details"
"""The message of an exception that is not an `RpcError`."""


Context = grpc.aio.ServicerContext[Any, Any]
"""The context of a call in its handler."""


async def abort(context: Context, error: RpcError) -> NoReturn:
    """End the call with `error` and its details.

    Raises:
        grpc.aio.AbortError: GRPC ends the handler with it.
        asyncio.CancelledError: The client has left, so the call is over.
    """
    with _cancelled_if_over():
        await context.abort_with_status(rpc_status.to_status(error.to_status()))
    raise AssertionError("gRPC aborts by an exception")


async def write(context: Context, response: Message) -> None:
    """Send a response of a stream.

    Raises:
        asyncio.CancelledError: The client has left, so the call is over.
    """
    try:  # not `_cancelled_if_over`: a context manager per token is too slow
        await context.write(response)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


@contextmanager
def _cancelled_if_over() -> Iterator[None]:
    """Turn gRPC's InternalError of a call that is over into a cancellation.

    gRPC raises it if the client has left and the handler writes before gRPC cancels its task.
    """
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


Guard = Callable[[str, Context], None]


class _Unparsable:
    """Replaces a request whose bytes do not parse."""

    __slots__ = ("error",)

    def __init__(self, error: RpcError) -> None:
        self.error = error


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Answers every failure of a call with a status.

    gRPC itself answers INTERNAL to a message that does not parse, and UNKNOWN with the exception's
    text if a handler raises. Here the first becomes INVALID_ARGUMENT, an `RpcError` becomes its own
    status, and any other exception is logged and becomes INTERNAL without details.

    Args:
        guard: Called before each handler with the method's path and the call's context; it may
            raise `RpcError`.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or (lambda _method, _context: None)

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], "Awaitable[grpc.RpcMethodHandler[Any, Any] | None]"
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:  # noqa: ANN401 - the stubs do not know that it may be None
        """Wrap the handler that `continuation` finds, if it is an asyncio handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        streaming, method = bool(handler.request_streaming), handler_call_details.method
        wrapped = _wrap(behaviour(handler), streaming, method, self._guard)
        if wrapped is None:
            return handler
        return with_behaviour(handler, wrapped, _safely(handler.request_deserializer))


def behaviour(handler: "grpc.RpcMethodHandler[Any, Any]") -> Callable[..., Any]:
    """Return the function that handles a method's calls."""
    function: Callable[..., Any] = getattr(handler, _kind(handler))
    return function


def with_behaviour(
    handler: "grpc.RpcMethodHandler[Any, Any]",
    function: Callable[..., Any],
    deserializer: Callable[[bytes], Any] | None,
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Return `handler` with another function and deserializer."""
    make = getattr(grpc, f"{_kind(handler)}_rpc_method_handler")
    made: grpc.RpcMethodHandler[Any, Any] = make(
        function, deserializer, handler.response_serializer
    )
    return made


def _kind(handler: "grpc.RpcMethodHandler[Any, Any]") -> str:
    requests = "stream" if handler.request_streaming else "unary"
    responses = "stream" if handler.response_streaming else "unary"
    return f"{requests}_{responses}"


def _wrap(
    function: Callable[..., Any], streaming: bool, method: str, guard: Guard
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
            guard(method, context)
            return await function(checked(request), context)
        except Exception as error:  # noqa: BLE001 - answered below
            request = None  # see `_forget`
            await _answer(context, error, method)

    async def iterate(
        request: Any,  # noqa: ANN401
        context: Context,
    ) -> None:
        try:
            guard(method, context)
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
    if isinstance(error, grpc.aio.AbortError):  # the handler has answered already
        raise error
    if isinstance(error, grpc.aio.InternalError):  # it could not: the call is over
        raise asyncio.CancelledError from error
    if not isinstance(error, RpcError):
        log.error("handler failed", method=method, exc_info=error)
        error = RpcError(grpc.StatusCode.INTERNAL, UNEXPECTED)
    _forget(error)
    await abort(context, error)


def _forget(error: RpcError) -> None:
    """Remove an error's frames, and with them its references to the request.

    gRPC keeps the exception that ends a call in a cycle with the call, so a refused request would
    stay in memory until the next garbage collection.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _safely(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Return a deserializer that returns `_Unparsable` where `deserialize` raises."""
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
