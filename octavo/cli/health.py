"""`octavo health`: the probe of containers and load balancers."""

from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2

from octavo.cli.connection import Server, with_server
from octavo.cli.output import fail, out
from octavo.client.channel import HEALTH_CHECK, secure
from octavo.common.rpc import LIVENESS
from octavo.common.tls import TlsError


@with_server
def health(
    server: Server,
    live: Annotated[
        bool,
        typer.Option("--live", help="Check liveness instead of readiness."),
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Maximum seconds to wait for the answer.")
    ] = 5.0,
) -> None:
    """Check over grpc.health.v1 whether a router or an engine is ready; exit code 0 or 1."""
    request = health_pb2.HealthCheckRequest(service=LIVENESS if live else "")
    try:
        with _connect(server) as channel:
            check = channel.unary_unary(
                HEALTH_CHECK,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            response = check(request, timeout=timeout)
    except TlsError as error:
        raise fail(str(error)) from None
    except grpc.RpcError as error:
        raise fail(f"{server.address}: {error.code().name}: {error.details()}") from None
    out.print(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(1)


def _connect(server: Server) -> grpc.Channel:
    credentials, options = secure(server.tls, None)
    if credentials is None:
        return grpc.insecure_channel(server.address, options)
    return grpc.secure_channel(server.address, credentials, options)
