"""TLS: credentials made of PEM files, on both sides of a connection."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog

from octavo.common.files import Signature, signature

log = structlog.get_logger(__name__)


class TlsError(Exception):
    """A PEM file is missing or unreadable, or files do not fit each other; the message says."""


@dataclass(frozen=True, slots=True)
class Tls:
    """One side's files, in PEM.

    Attributes:
        ca: Certificates of the authorities that the other side's must be of.
            None: on a client, the public ones; on a server, clients need none.
        cert: This side's certificate, those that lead to its authority after it.
        key: The certificate's private key, without a passphrase.
        name: On a client, what the server's certificate must be for. Default:
            the host that is connected to.
    """

    ca: Path | str | None = None
    cert: Path | str | None = None
    key: Path | str | None = None
    name: str | None = None

    @property
    def files(self) -> tuple[Path, ...]:
        """Those that there are."""
        return tuple(Path(path) for path in (self.ca, self.cert, self.key) if path is not None)

    def read(self) -> "_Contents":
        """Reads the files and checks that they can be used, together.

        Raises:
            TlsError: They cannot, or were changed meanwhile.
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
                # An empty passphrase, or it would be asked for on the terminal.
                context.load_cert_chain(self.cert, self.key, password="")
        except OSError as error:
            raise TlsError(
                f"{self.cert} and {self.key} are no certificate and its key, in PEM and without "
                f"passphrase ({_reason(error)})"
            ) from None
        if signature(*self.files) != before:
            raise TlsError(f"{self.cert or self.ca} is being changed")
        return contents


@dataclass(frozen=True, slots=True, repr=False)
class _Contents:
    """What is in the files of a `Tls`."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        assert self.cert is not None
        assert self.key is not None
        pairs = [(self.key, self.cert)]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=self.ca)


class _Reloading:
    """A server's files, read anew for the first connection after a change."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._seen: Signature = signature(*tls.files)
        self.first = tls.read().server_configuration()

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """Returns the new configuration; None where nothing changed, or what is new is wrong."""
        now = signature(*self._tls.files)
        if now == self._seen:
            return None
        self._seen = now
        try:
            contents = self._tls.read()
        except TlsError as error:
            log.warning("certificate_not_reloaded", reason=str(error))
            return None
        log.info("certificate_reloaded", file=str(self._tls.cert))
        return contents.server_configuration()


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Makes a server's credentials; files that change hold for all connections that come then.

    With `ca`, clients must have a certificate of it.

    Raises:
        TlsError: The files cannot be used.
    """
    reloading = _Reloading(tls)
    return grpc.dynamic_ssl_server_credentials(
        reloading.first,
        reloading,  # type: ignore[arg-type] # the stubs do not know that it may return None
        require_client_authentication=tls.ca is not None,
    )


def channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Makes a client's credentials, of the files as they are now.

    Raises:
        TlsError: The files cannot be used.
    """
    contents = tls.read()
    return grpc.ssl_channel_credentials(contents.ca, contents.key, contents.cert)


def channel_options(tls: Tls) -> list[tuple[str, str]]:
    """Returns the channel arguments that a client's credentials need beside them."""
    return [("grpc.ssl_target_name_override", tls.name)] if tls.name else []


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"cannot read {path}: {error.strerror}") from None


def _reason(error: OSError) -> str:
    said = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return str(said or error).lower().replace("_", " ")
