"""`octavo health`: the probe of containers and load balancers."""

import json
from typing import Annotated, Any

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from octavo.cli.connection import Server, with_server
from octavo.cli.output import fail, out
from octavo.client.channel import secure
from octavo.common.proxies import NO_PROXY
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
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Check over grpc.health.v1 whether a router or an engine is ready; exit code 0 or 1."""
    status, error = "UNKNOWN", ""
    try:
        status = _check(server, live=live, timeout=timeout)
    except TlsError as problem:
        error = str(problem)
    except grpc.RpcError as problem:
        error = f"{problem.code().name}: {problem.details()}"
    if as_json:
        check = "liveness" if live else "readiness"
        result = {"address": server.address, "check": check, "status": status}
        typer.echo(json.dumps(result | ({"error": error} if error else {})))
    elif error:
        raise fail(f"{server.address}: {error}")
    else:
        out.print(status)
    if status != "SERVING":
        raise typer.Exit(1)


def _check(server: Server, *, live: bool, timeout: float) -> str:
    """Return the name of the server's status.

    Raises:
        TlsError: The TLS files cannot be used.
        grpc.RpcError: The server does not answer in time.
    """
    request = health_pb2.HealthCheckRequest(service=LIVENESS if live else "")
    with _connect(server) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = stub.Check(request, timeout=timeout)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name


def _connect(server: Server) -> grpc.Channel:
    credentials, options = secure(server.address, server.tls, None)
    options = (*options, NO_PROXY)
    if credentials is None:
        return grpc.insecure_channel(server.address, options)
    return grpc.secure_channel(server.address, credentials, options)
