"""The AdminService server, in the router's process or in the parent of its workers."""

from functools import partial

import grpc.aio

from octavo.common import rpc
from octavo.common.listening import listen
from octavo.router.settings import RouterSettings
from octavo.v1 import admin_pb2_grpc

ADMIN = "octavo.v1.AdminService"


async def make_admin_server(
    settings: RouterSettings, service: admin_pb2_grpc.AdminServiceServicer, guard: rpc.Guard
) -> grpc.aio.Server:
    """Create the AdminService server: bound, but not started.

    Args:
        settings: The server's address, limits and TLS files.
        service: The implementation of AdminService.
        guard: Authenticates the callers.

    Raises:
        OSError: The address is in use, or not local to this machine.
        TlsError: Certificates or keys cannot be used.
    """
    server, health = await rpc.create_server(
        {ADMIN: partial(admin_pb2_grpc.add_AdminServiceServicer_to_server, service)},
        max_message_bytes=settings.max_message_bytes,
        limits=settings.connection_limits,
        guard=guard,
    )
    listen(server, settings.admin_host, settings.admin_port, settings.tls, flag="--admin-port")
    await rpc.set_serving(health, ["", ADMIN], serving=True)
    return server
