"""gRPC for the router and the engine: errors with details, handlers, servers.

Handlers raise `RpcError`, which `RpcInterceptor` turns into a status with google.rpc details.
"""

from octavo.common.rpc.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    RpcError,
    denied,
    exhausted,
    invalid,
    not_found,
    precondition,
    unavailable,
    unimplemented,
)
from octavo.common.rpc.handlers import (
    UNEXPECTED,
    Context,
    Guard,
    RpcInterceptor,
    abort,
    write,
)
from octavo.common.rpc.server import (
    LIVENESS,
    HealthServicer,
    channel_options,
    create_server,
    server_options,
    set_serving,
    until_terminated,
)

__all__ = [
    "CONTEXT_LENGTH_EXCEEDED",
    "LIVENESS",
    "UNEXPECTED",
    "Context",
    "Guard",
    "HealthServicer",
    "RpcError",
    "RpcInterceptor",
    "abort",
    "channel_options",
    "create_server",
    "denied",
    "exhausted",
    "invalid",
    "not_found",
    "precondition",
    "server_options",
    "set_serving",
    "unavailable",
    "unimplemented",
    "until_terminated",
    "write",
]
