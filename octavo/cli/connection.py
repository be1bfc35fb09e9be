"""The server that a command talks to: its address, who asks, over what wire."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.cli.output import fail
from octavo.cli.signature import expand
from octavo.client import AsyncClient, Client, Tls, TlsError
from octavo.client.channel import DEFAULT_ADDRESS


@dataclass(frozen=True, slots=True)
class Server:
    """A server and how to connect to it."""

    address: str = DEFAULT_ADDRESS
    api_key: str | None = field(default=None, repr=False)
    tls: Tls | None = None

    def client(self) -> Client:
        """Makes a client.

        Raises:
            typer.Exit: the files for TLS cannot be used.
        """
        try:
            return Client(self.address, api_key=self.api_key, tls=self.tls)
        except TlsError as error:
            raise fail(str(error)) from None

    def async_client(self) -> AsyncClient:
        """As `client`, for asyncio."""
        try:
            return AsyncClient(self.address, api_key=self.api_key, tls=self.tls)
        except TlsError as error:
            raise fail(str(error)) from None


def _option(text: str, *names: str) -> Any:  # noqa: ANN401 - typer says the same
    """An option that is also the variable of its last name."""
    variable = f"OCTAVO_{names[-1].strip('-').replace('-', '_').upper()}"
    return typer.Option(*names, envvar=variable, help=text, rich_help_panel="Connection")


def _server(
    *,
    address: Annotated[str, _option("The server's HOST:PORT.", "-a", "--address")] = (
        DEFAULT_ADDRESS
    ),
    api_key: Annotated[
        str | None,
        _option("Says who asks. A flag can be seen by others here, the variable not.", "--api-key"),
    ] = None,
    tls: Annotated[bool, _option("TLS; the server's authority is a public one.", "--tls")] = False,
    ca: Annotated[
        Path | None, _option("TLS; the server's authority is in this PEM file.", "--ca")
    ] = None,
    client_cert: Annotated[
        Path | None, _option("TLS; the certificate to show to the server.", "--client-cert")
    ] = None,
    client_key: Annotated[
        Path | None, _option("The private key of --client-cert.", "--client-key")
    ] = None,
    tls_name: Annotated[
        str | None,
        _option("The name that the server's certificate is for, if not --address's.", "--tls-name"),
    ] = None,
) -> Server:
    """Makes a server of what `with_server` adds to a command."""
    wanted = tls or ca or client_cert or client_key or tls_name
    return Server(address, api_key, Tls(ca, client_cert, client_key, tls_name) if wanted else None)


def with_server(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a connection in place of its parameter `server`."""
    return expand(command, "server", inspect.signature(_server).parameters.values(), _server)
