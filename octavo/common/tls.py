"""TLS credentials from PEM files, for servers and clients."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import grpc
import structlog

from octavo.common.file_signature import Signature, signature

log = structlog.get_logger(__name__)

T = TypeVar("T")


class TlsError(Exception):
    """A PEM file is missing or invalid, or files do not match; the message names it."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of one side of a connection.

    Attributes:
        ca: Certificate authorities that must have signed the peer's certificate. None: on a client,
            the public authorities; on a server, clients need no certificate.
        cert: This side's certificate and its chain.
        key: Unencrypted private key of the certificate.
        name: On a client, the server's expected name. Default: the host in the address.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    name: str | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are set."""
        return tuple(Path(path) for path in (self.ca, self.cert, self.key) if path is not None)

    def read(self) -> "_Contents":
        """Read the files and check that they match.

        Raises:
            TlsError: The files do not match, or changed meanwhile.
        """
        before = signature(*self.files)
        contents = _Contents(_read(self.ca), _read(self.cert), _read(self.key))
        if (self.cert is None) != (self.key is None):
            raise TlsError(f"{self.cert or self.key}: a certificate and its key go together")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            if self.ca is not None:
                context.load_verify_locations(self.ca)
        except OSError as error:
            raise TlsError(f"{self.ca} has no certificate in PEM ({_reason(error)})") from None
        try:
            if self.cert is not None:
                # An empty passphrase, to prevent a prompt on the terminal.
                context.load_cert_chain(self.cert, self.key, password="")
        except OSError as error:
            raise TlsError(
                f"{self.cert} and {self.key} are not a matching PEM certificate and unencrypted "
                f"private key ({_reason(error)})"
            ) from None
        if signature(*self.files) != before:
            raise TlsError(f"{self.cert or self.ca} is being changed")
        return contents


@dataclass(frozen=True, slots=True, repr=False)
class _Contents:
    """The contents of the files of a `Tls`."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self.cert is not None
        assert self.key is not None
        pairs = [(self.key, self.cert)]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=self.ca)


class _Reloading(Generic[T]):
    """A server's credentials, updated at the first connection after a change of the files.

    Attributes:
        current: Credentials from the newest valid files.

    Raises:
        TlsError: The files cannot be used.
    """

    def __init__(self, tls: Tls, make: Callable[[Tls], T]) -> None:
        self._tls = tls
        self._make = make
        self._seen: Signature = signature(*tls.files)
        self.current = make(tls)

    def update(self) -> bool:
        """Update `current` if the files have changed and are valid; return whether they have."""
        now = signature(*self._tls.files)
        if now == self._seen:
            return False
        self._seen = now
        try:
            self.current = self._make(self._tls)
        except TlsError as error:
            log.warning("certificate not reloaded", reason=str(error))
            return False
        log.info("certificate reloaded", file=str(self._tls.cert))
        return True


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return a gRPC server's credentials; later connections use changed files.

    With `ca`, clients need a certificate that it signed.

    Raises:
        TlsError: The files cannot be used.
    """
    files = _Reloading(tls, lambda tls: tls.read().server_configuration())
    return grpc.dynamic_ssl_server_credentials(
        files.current,
        lambda: files.current if files.update() else None,  # type: ignore[arg-type,return-value]
        require_client_authentication=tls.ca is not None,
    )


def server_context(tls: Tls) -> ssl.SSLContext:
    """Return an HTTPS server's context; later connections use changed files.

    With `ca`, clients need a certificate that it signed.

    Raises:
        TlsError: The files cannot be used.
    """
    files = _Reloading(tls, _http_context)
    first = files.current

    def reload(connection: ssl.SSLObject, _name: str | None, context: ssl.SSLContext) -> None:
        files.update()
        if files.current is not context:
            connection.context = files.current

    # Called at each handshake, also without a server name.
    first.sni_callback = reload
    return first


def _http_context(tls: Tls) -> ssl.SSLContext:
    tls.read()  # raises TlsError with the file's name
    assert tls.cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(tls.cert, tls.key, password="")
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return a client's credentials from the current files.

    Raises:
        TlsError: The files cannot be used.
    """
    contents = tls.read()
    return grpc.ssl_channel_credentials(contents.ca, contents.key, contents.cert)


def channel_options(tls: Tls) -> list[tuple[str, str]]:
    """Return the channel arguments for a client's credentials."""
    return [("grpc.ssl_target_name_override", tls.name)] if tls.name else []


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"cannot read {path}: {error.strerror}") from None


def _reason(error: OSError) -> str:
    reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return str(reason or error).lower().replace("_", " ")
