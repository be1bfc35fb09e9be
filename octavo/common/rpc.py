"""gRPC as both services use it: errors with details, an interceptor, a server.

Handlers raise `RpcError`; `RpcInterceptor` turns it into a `google.rpc.Status`
with `BadRequest` and `RetryInfo`, answers messages that do not parse, and keeps
the internals of unexpected exceptions out of what clients see.
"""

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from functools import lru_cache
from typing import Any, NoReturn

import grpc
import grpc.aio
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from octavo.common.connections import DEFAULT_LIMITS, ConnectionLimits

log = structlog.get_logger(__name__)

LIVENESS = "liveness"
"""The name in the health service that is SERVING for as long as the process answers: what a
liveness probe asks for, as a server without engines, or one that drains, must not be restarted."""

UNEXPECTED = "an unexpected error; the server's log has the details"
"""What callers hear of an exception that is no `RpcError`."""

TERMINATION_SECONDS = 3600.0
"""How long one wait for a server's end takes before the next one."""

_CODES: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}


class RpcError(Exception):
    """A failure that the caller is told about, in full.

    Attributes:
        code: The gRPC status.
        message: What happened and what to do next, for a person.
        field: The request's field at fault, by its path in the message.
        retry_after: Seconds after which trying again makes sense.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        message: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after

    @classmethod
    def from_code(cls, code: int, message: str, field: str | None = None) -> "RpcError":
        """Makes an error from a number of google.rpc.Code; unknown ones are INTERNAL."""
        status = _CODES.get(code, grpc.StatusCode.INTERNAL)
        if status is grpc.StatusCode.OK:
            status = grpc.StatusCode.INTERNAL
        return cls(status, message, field=field or None)

    def to_status(self) -> status_pb2.Status:
        """Returns the error as google.rpc.Status with its details."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        if self.field is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(
                field=self.field, description=self.message
            )
            _pack(status, error_details_pb2.BadRequest(field_violations=[violation]))
        if self.retry_after is not None:
            retry = error_details_pb2.RetryInfo()
            seconds = math.floor(self.retry_after)
            retry.retry_delay.seconds = seconds
            retry.retry_delay.nanos = int((self.retry_after - seconds) * 1e9)
            _pack(status, retry)
        return status


def _pack(status: status_pb2.Status, detail: Message) -> None:
    packed = AnyMessage()
    packed.Pack(detail)
    status.details.append(packed)


def invalid(field: str, message: str) -> RpcError:
    """INVALID_ARGUMENT: `field` is at fault whatever the state of the service."""
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, message, field=field)


def not_found(field: str, message: str) -> RpcError:
    """NOT_FOUND: what `field` names does not exist."""
    return RpcError(grpc.StatusCode.NOT_FOUND, message, field=field)


def precondition(field: str, message: str) -> RpcError:
    """FAILED_PRECONDITION: `field` asks for what the service is not set up to do."""
    return RpcError(grpc.StatusCode.FAILED_PRECONDITION, message, field=field)


def unimplemented(field: str, message: str) -> RpcError:
    """UNIMPLEMENTED: `field` asks for what the service cannot do."""
    return RpcError(grpc.StatusCode.UNIMPLEMENTED, message, field=field)


def denied(message: str, field: str | None = None) -> RpcError:
    """PERMISSION_DENIED: it is known who asks, and that they may not."""
    return RpcError(grpc.StatusCode.PERMISSION_DENIED, message, field=field)


def unavailable(message: str, retry_after: float | None = None) -> RpcError:
    """UNAVAILABLE: nobody can serve now; trying again may succeed."""
    return RpcError(grpc.StatusCode.UNAVAILABLE, message, retry_after=retry_after)


def exhausted(message: str, retry_after: float) -> RpcError:
    """RESOURCE_EXHAUSTED: too much is asked at once; try again after `retry_after` seconds."""
    return RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, retry_after=retry_after)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RpcError) -> NoReturn:
    """Ends the call with `error` and its details.

    Raises:
        grpc.aio.AbortError: gRPC ends the handler with it.
        asyncio.CancelledError: The call is over: the client has left.
    """
    with _cancelled_if_over():
        await context.abort_with_status(rpc_status.to_status(error.to_status()))
    raise AssertionError("gRPC aborts by an exception")


async def write(context: grpc.aio.ServicerContext[Any, Any], response: Message) -> None:
    """Sends a response of a stream.

    Raises:
        asyncio.CancelledError: The call is over: the client has left.
    """
    try:  # as `_cancelled_if_over`, which would cost more than a little for every token
        await context.write(response)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


@contextmanager
def _cancelled_if_over() -> Iterator[None]:
    """Makes gRPC's complaint that a call is over into what it is: the call was cancelled.

    It complains where the client has left and the handler, whose task it
    cancels for that, is faster than it.
    """
    try:
        yield
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError from error


Guard = Callable[[str, grpc.aio.ServicerContext[Any, Any]], None]


class _Unparsable:
    """Stands where a request should be, for bytes that are not one."""

    __slots__ = ("error",)

    def __init__(self, error: RpcError) -> None:
        self.error = error


class RpcInterceptor(grpc.aio.ServerInterceptor):
    """Turns what goes wrong around and in a handler into the status that says so.

    gRPC itself answers INTERNAL to a message that does not parse, and UNKNOWN
    with the exception's text to a handler that raises. Here the first becomes
    INVALID_ARGUMENT naming the field, `RpcError` becomes its own status, and
    any other exception is logged and answered with a bare INTERNAL.

    Args:
        guard: Called before each call is looked into, with the method's path
            and the call's context; may raise `RpcError`.
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
        """Wraps the handler that `continuation` finds, if it is an asyncio one."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        streaming, method = bool(handler.request_streaming), handler_call_details.method
        wrapped = _wrap(behaviour(handler), streaming, method, self._guard)
        if wrapped is None:
            return handler
        return with_behaviour(handler, wrapped, _safely(handler.request_deserializer))


def behaviour(handler: "grpc.RpcMethodHandler[Any, Any]") -> Callable[..., Any]:
    """Returns the function that handles a method's calls."""
    function: Callable[..., Any] = getattr(handler, _kind(handler))
    return function


def with_behaviour(
    handler: "grpc.RpcMethodHandler[Any, Any]",
    function: Callable[..., Any],
    deserializer: Callable[[bytes], Any] | None,
) -> "grpc.RpcMethodHandler[Any, Any]":
    """Returns a handler like `handler` that runs `function` on what `deserializer` gives."""
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
    """Returns the handler with its exceptions turned into statuses; None if it is synchronous."""

    def checked(request: Any) -> Any:  # noqa: ANN401 - a message or an iterator of them
        if streaming:
            return _parsed(request)
        if isinstance(request, _Unparsable):
            raise request.error
        return request

    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:  # noqa: ANN401
        try:
            guard(method, context)
            return await function(checked(request), context)
        except Exception as error:  # noqa: BLE001 - answered below
            request = None  # see `_forget`
            await _answer(context, error, method)

    async def iterate(
        request: Any,  # noqa: ANN401
        context: grpc.aio.ServicerContext[Any, Any],
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


async def _answer(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str
) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):  # the handler has answered already
        raise error
    if isinstance(error, grpc.aio.InternalError):  # it could not: the call is over
        raise asyncio.CancelledError from error
    if not isinstance(error, RpcError):
        log.error("handler_failed", method=method, exc_info=error)
        error = RpcError(
            grpc.StatusCode.INTERNAL,
            UNEXPECTED,
        )
    _forget(error)
    await abort(context, error)


def _forget(error: RpcError) -> None:
    """Cuts an error off the frames that it came through, and so off the request.

    gRPC keeps the exception that ends a call in a cycle with the call, so that a refused
    request would stay in memory until garbage is next collected.
    """
    error.__traceback__ = error.__context__ = error.__cause__ = None


def _safely(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """Returns a deserializer that gives `_Unparsable` where `deserialize` raises."""
    if deserialize is None:
        return None

    def parse(data: bytes) -> Any:  # noqa: ANN401 - a message or _Unparsable
        try:
            return deserialize(data)
        except DecodeError:
            # Generated code passes the class's FromString, which is bound to it.
            return _Unparsable(_explain(data, getattr(deserialize, "__self__", None)))

    return parse


def _explain(data: bytes, message_class: type[Message] | None) -> RpcError:
    """Finds out why `data` does not parse."""
    if message_class is None:
        return RpcError(grpc.StatusCode.INVALID_ARGUMENT, "the message is not valid protobuf")
    name = message_class.DESCRIPTOR.name
    try:
        twin = _bytes_twin(message_class.DESCRIPTOR).FromString(data)
    except DecodeError:
        return RpcError(
            grpc.StatusCode.INVALID_ARGUMENT, f"the message is not a valid protobuf {name}"
        )
    for path, value in _byte_fields(twin):
        try:
            value.decode()
        except UnicodeDecodeError as error:
            return invalid(path, f"{path} must be valid UTF-8; its byte {error.start} is not")
    return RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"the message is not a valid protobuf {name}")


@lru_cache(maxsize=64)
def _bytes_twin(descriptor: Descriptor) -> type[Message]:
    """Returns the same message with every string field made a bytes field.

    The two have one wire format, but bytes need not be UTF-8: so what the
    message rejects parses here, and the field at fault can be named.
    """
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        proto = descriptor_pb2.FileDescriptorProto()
        descriptor.file.pool.FindFileByName(name).CopyToProto(proto)
        for dependency in proto.dependency:
            add(dependency)
        for message in proto.message_type:
            _strings_to_bytes(message)
        pool.Add(proto)

    add(descriptor.file.name)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))


def _strings_to_bytes(message: descriptor_pb2.DescriptorProto) -> None:
    for nested in message.nested_type:
        if not nested.options.map_entry:  # a map's key cannot be bytes
            _strings_to_bytes(nested)
    for field in message.field:
        if field.type == descriptor_pb2.FieldDescriptorProto.TYPE_STRING:
            field.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES


def _byte_fields(message: Message, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Yields path and value of every bytes field that is set, in depth."""
    for field, value in message.ListFields():
        if field.type not in (FieldDescriptor.TYPE_BYTES, FieldDescriptor.TYPE_MESSAGE):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        repeated = not isinstance(value, bytes | Message)
        for i, item in enumerate(value if repeated else [value]):
            path = f"{prefix}{field.name}[{i}]" if repeated else f"{prefix}{field.name}"
            if isinstance(item, bytes):
                yield path, item
            else:
                yield from _byte_fields(item, f"{path}.")


def server_options(max_message_bytes: int, limits: ConnectionLimits) -> list[tuple[str, int]]:
    """Returns the channel arguments of a server.

    A peer that stops answering pings is gone after 20 s, whether it has calls
    in progress, silent or not, or none: nobody takes a place for nothing.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),  # a second server on the port must fail, not share it
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        *limits.options(),
    ]


def channel_options(*, keepalive_time: float, keepalive_timeout: float) -> list[tuple[str, int]]:
    """Returns the channel arguments of a client that notices when its server is gone.

    Args:
        keepalive_time: Seconds of silence after which the server is pinged.
        keepalive_timeout: Seconds that it then has to answer.
    """
    return [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_timeout * 1000)),
        # The keepalive's ping has this timeout too: a minute if it is not set.
        ("grpc.http2.ping_timeout_ms", int(keepalive_timeout * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),  # no other channel's backoff is waited out
    ]


async def create_server(
    services: Mapping[str, Callable[[grpc.aio.Server], None]],
    *,
    max_message_bytes: int,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    guard: Guard | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> tuple[grpc.aio.Server, health.aio.HealthServicer]:
    """Makes a server of `services` with health and reflection, not yet started.

    Args:
        services: Full name of each service, and the call that adds it to a server.
        max_message_bytes: Longest message that is received.
        limits: What peers may take.
        guard: Who may call what, as `RpcInterceptor` takes it; None: anybody anything.
        interceptors: Further ones, inside of `RpcInterceptor`.

    Returns:
        The server, and its health service: every service, and "" for the whole,
        is NOT_SERVING until the owner says otherwise; `LIVENESS` is SERVING.
    """
    from grpc_reflection.v1alpha import reflection  # noqa: PLC0415 - of the servers' extras

    server = grpc.aio.server(
        interceptors=[RpcInterceptor(guard), *interceptors],
        options=server_options(max_message_bytes, limits),
    )
    for add in services.values():
        add(server)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    await set_serving(health_servicer, ["", *services], serving=False)
    await set_serving(health_servicer, [LIVENESS], serving=True)
    names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    return server, health_servicer


async def until_terminated(server: grpc.aio.Server) -> None:
    """Wait until a server has stopped.

    Raises:
        Exception: What it crashed with.
    """
    # Without a timeout, gRPC lets the future that the server itself needs be cancelled with us.
    while not await server.wait_for_termination(TERMINATION_SECONDS):
        pass


async def set_serving(
    servicer: health.aio.HealthServicer, services: Sequence[str], *, serving: bool
) -> None:
    """Says of each of `services` whether it is SERVING or NOT_SERVING."""
    status = health_pb2.HealthCheckResponse
    for name in services:
        await servicer.set(name, status.SERVING if serving else status.NOT_SERVING)
