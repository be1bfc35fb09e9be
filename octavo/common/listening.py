"""A server's listening address and TLS files."""

from pathlib import Path
from typing import Self

import grpc.aio
from pydantic import Field, model_validator

from octavo.common.ports import Listener
from octavo.common.settings import Settings
from octavo.common.tls import Tls, server_credentials


class TlsSettings(Settings):
    """TLS settings of the router's and the engine's own port."""

    tls_cert: Path | None = Field(
        None,
        description="PEM file of the port's certificate; reloaded on change. Default: no TLS.",
    )
    tls_key: Path | None = Field(
        None, description="PEM file of the certificate's private key, not encrypted."
    )
    tls_client_ca: Path | None = Field(
        None,
        description="PEM file of the certificate authorities that sign client certificates. "
        "Default: clients need no certificate.",
    )

    @model_validator(mode="after")
    def _together(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key go together")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-client-ca needs --tls-cert and --tls-key")
        return self

    @property
    def tls(self) -> Tls | None:
        """The port's TLS files; None: no TLS."""
        if self.tls_cert is None:
            return None
        return Tls(self.tls_client_ca, self.tls_cert, self.tls_key)


def listen(
    server: grpc.aio.Server,
    host: str,
    port: int,
    tls: Tls | None,
    *,
    flag: str = "--port",
    shared: bool = False,
) -> str:
    """Bind a server to a port before its start, 0 for a free one; return HOST:PORT.

    Args:
        server: The server.
        host: Address to listen on.
        port: Port to listen on.
        tls: TLS files; None: plaintext.
        flag: Setting of the port, for error messages.
        shared: Whether other processes listen on the same port, which their parent has reserved.

    Raises:
        OSError: The port is in use, or the address is not local to this machine.
        TlsError: The files cannot be used.
    """
    credentials = None if tls is None else server_credentials(tls)
    listener = Listener(host, port, flag)
    if not shared:
        listener.check()  # raises the reason, which gRPC does not
    name = listener.address.removesuffix(f":{port}")
    try:
        bound = (
            server.add_insecure_port(listener.address)
            if credentials is None
            else server.add_secure_port(listener.address, credentials)
        )
    except RuntimeError as error:
        raise listener.error(OSError(str(error))) from error
    return f"{name}:{bound}"


def listen_on_socket(server: grpc.aio.Server, path: Path) -> str:
    """Bind a server to a Unix socket before its start; return its address.

    Raises:
        OSError: The socket cannot be created.
    """
    address = f"unix:{path}"
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {path}: {error}") from error
    return address
