"""gRPC servers with health and reflection, and the channel arguments of both sides."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from octavo.common import background
from octavo.common.connections import DEFAULT_LIMITS, ConnectionLimits
from octavo.common.proxies import NO_PROXY
from octavo.common.rpc.handlers import Guard, RpcInterceptor

LIVENESS = "liveness"
"""Health service name that is always SERVING, for liveness probes: servers without engines, or
while draining, must not be restarted."""
TERMINATION_SECONDS = 3600.0
"""Timeout of one wait for a server's end, in seconds; the wait is repeated."""


class HealthServicer(health.aio.HealthServicer):
    """gRPC's health service, whose Watch calls the server can end."""

    def __init__(self) -> None:
        super().__init__()
        self._watches: set[asyncio.Task[None]] = set()

    async def Watch(  # noqa: N802
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Send a service's status whenever it changes."""
        watch = background.start(super().Watch(request, context), "health-watch")
        self._watches.add(watch)
        try:
            await asyncio.wait({watch})
        finally:
            self._watches.discard(watch)
            await background.end(watch)

    def end_watches(self) -> None:
        """End all calls of Watch."""
        for watch in self._watches:
            watch.cancel()


def server_options(
    max_message_bytes: int, limits: ConnectionLimits, *, reuse_port: bool = False
) -> list[tuple[str, int]]:
    """Return the gRPC channel arguments of a server.

    A peer that does not answer pings is disconnected after 20 s, with or without calls.
    """
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # A second server on the port must fail, unless the port is shared.
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        *limits.options(),
    ]


def channel_options(*, keepalive_time: float, keepalive_timeout: float) -> list[tuple[str, int]]:
    """Return the channel arguments of a client that detects the loss of its server.

    Args:
        keepalive_time: Seconds of silence before a ping.
        keepalive_timeout: Seconds to wait for the ping's answer.
    """
    return [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.keepalive_time_ms", int(keepalive_time * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_timeout * 1000)),
        # Keepalive pings use this timeout too; its default is a minute.
        ("grpc.http2.ping_timeout_ms", int(keepalive_timeout * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),  # no shared backoff with other channels
        NO_PROXY,  # a proxy to the internet cannot reach engines
    ]


async def create_server(
    services: Mapping[str, Callable[[grpc.aio.Server], None]],
    *,
    max_message_bytes: int,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    guard: Guard | None = None,
    max_calls_per_peer: int = 0,
    reuse_port: bool = False,
) -> tuple[grpc.aio.Server, HealthServicer]:
    """Create a server of `services` with health and reflection, not started yet.

    Args:
        services: Function that adds each service to a server, by the service's full name.
        max_message_bytes: Maximum size of a received message.
        limits: Limits of connections.
        guard: Authenticates calls, see `RpcInterceptor`; None: all calls are allowed.
        max_calls_per_peer: Maximum calls of an address in progress; 0: unlimited.
        reuse_port: Whether other processes of this user share the ports (SO_REUSEPORT).

    Returns:
        The server and its health service. Every service, and "" for the whole server, is
        NOT_SERVING until `set_serving`; `LIVENESS` is SERVING.
    """
    from grpc_reflection.v1alpha import reflection  # noqa: PLC0415 - in the servers' extras

    server = grpc.aio.server(
        interceptors=[RpcInterceptor(guard, max_calls_per_peer)],
        options=server_options(max_message_bytes, limits, reuse_port=reuse_port),
    )
    for add in services.values():
        add(server)
    health_servicer = HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    await set_serving(health_servicer, ["", *services], serving=False)
    await set_serving(health_servicer, [LIVENESS], serving=True)
    names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
    reflection.enable_server_reflection(names, server)
    return server, health_servicer


async def until_terminated(server: grpc.aio.Server) -> None:
    """Wait until a server has stopped.

    Raises:
        Exception: The error with which the server crashed.
    """
    # Without a timeout, cancelling this wait would cancel a future that the server needs. It
    # returns whether it timed out.
    while await server.wait_for_termination(TERMINATION_SECONDS):
        pass


async def set_serving(
    servicer: health.aio.HealthServicer, services: Sequence[str], *, serving: bool
) -> None:
    """Set the health of each of `services` to SERVING or NOT_SERVING."""
    status = health_pb2.HealthCheckResponse
    for name in services:
        await servicer.set(name, status.SERVING if serving else status.NOT_SERVING)
