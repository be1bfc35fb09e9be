"""Calls between a router's parent process and its workers: JSON over gRPC, on Unix sockets.

Both sides have the same version and machine, so these calls may change freely; only AdminService is
public.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from octavo.common import rpc
from octavo.common.connections import DEFAULT_LIMITS
from octavo.common.rpc import create_server

SERVICE = "octavo.router.workers"
MAX_MESSAGE_BYTES = 64 << 20
"""Maximum message size, many times the metrics of a thousand tenants."""

Method = Callable[[Any, rpc.Context], Awaitable[Any]]
"""Takes a request and the call's context, and returns the response; both are values of JSON."""


async def make_server(
    socket: Path,
    methods: Mapping[str, Method],
    services: Mapping[str, Callable[[grpc.aio.Server], None]],
) -> grpc.aio.Server:
    """Create a server on a Unix socket; not started yet.

    Args:
        socket: Path of the socket, in a directory of this user only.
        methods: Methods for `call`, by name.
        services: Other services, in `create_server`'s form.
    """

    def add(server: grpc.aio.Server) -> None:
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(method, json.loads, _encode)
            for name, method in methods.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    server, _ = await create_server(
        {SERVICE: add, **services}, max_message_bytes=MAX_MESSAGE_BYTES, limits=DEFAULT_LIMITS
    )
    server.add_insecure_port(f"unix:{socket}")
    return server


def channel(socket: Path) -> grpc.aio.Channel:
    """Return a channel to a server on a Unix socket."""
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.use_local_subchannel_pool", 1),  # no shared backoff with other workers
    ]
    return grpc.aio.insecure_channel(f"unix:{socket}", options=options)


async def call(channel: grpc.aio.Channel, method: str, request: object, timeout: float) -> Any:  # noqa: ANN401
    """Call one of a server's `methods` and return its result.

    Raises:
        grpc.aio.AioRpcError: The call failed, or timed out after `timeout` seconds.
    """
    made = channel.unary_unary(f"/{SERVICE}/{method}", _encode, json.loads)
    return await made(request, timeout=timeout)


def _encode(message: object) -> bytes:
    return json.dumps(message).encode()
