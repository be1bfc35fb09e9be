"""A command's connection to a server: address, API key and TLS."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.output import fail
from octavo.cli.signature import expand
from octavo.client import AsyncClient, Client, Tls, TlsError
from octavo.client.address import DEFAULT_ADDRESS
from octavo.client.channel import locate


@dataclass(frozen=True, slots=True)
class Server:
    """A server's address and credentials."""

    address: str = DEFAULT_ADDRESS
    api_key: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    def client(self) -> Client:
        """Return a client.

        Raises:
            typer.Exit: The TLS files cannot be used.
        """
        try:
            return Client(self.address, api_key=self.api_key, tls=self.tls)
        except TlsError as error:
            raise fail(str(error)) from None

    def async_client(self) -> AsyncClient:
        """Return an asyncio client; errors as in `client`."""
        try:
            return AsyncClient(self.address, api_key=self.api_key, tls=self.tls)
        except TlsError as error:
            raise fail(str(error)) from None


def _option(text: str, *names: str) -> Any:  # noqa: ANN401 - typer's type
    """Return an option whose environment variable is named after its last name."""
    variable = f"OCTAVO_{names[-1].strip('-').replace('-', '_').upper()}"
    return typer.Option(*names, envvar=variable, help=text, rich_help_panel="Connection")


def _server(
    *,
    address: Annotated[
        str,
        _option(
            "HOST:PORT of the server; https://HOST:PORT uses TLS. The default port is 50051.",
            *("-a", "--address"),
        ),
    ] = DEFAULT_ADDRESS,
    api_key: Annotated[
        str | None,
        _option(
            "API key. Other users see flags in the process list; prefer the variable.", "--api-key"
        ),
    ] = None,
    tls: Annotated[
        bool, _option("Use TLS with the public certificate authorities.", "--tls")
    ] = False,
    ca: Annotated[
        Path | None, _option("Use TLS with the certificate authorities in this PEM file.", "--ca")
    ] = None,
    client_cert: Annotated[
        Path | None,
        _option("Use TLS with the client certificate in this PEM file.", "--client-cert"),
    ] = None,
    client_key: Annotated[
        Path | None, _option("PEM file of the private key of --client-cert.", "--client-key")
    ] = None,
    tls_name: Annotated[
        str | None,
        _option("Expected name in its certificate. Default: the host in --address.", "--tls-name"),
    ] = None,
) -> Server:
    """Return the server of `with_server`'s options."""
    wanted = tls or ca or client_cert or client_key or tls_name
    files = Tls(ca, client_cert, client_key, tls_name) if wanted else None
    try:
        address, files = locate(address, files)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--address") from None
    return Server(address, api_key, files)


def with_server(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `server` with the connection options."""
    return expand(command, "server", inspect.signature(_server).parameters.values(), _server)
