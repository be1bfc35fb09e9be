"""TLS for the HTTP door, of the same files as the gRPC port's."""

import ssl

import structlog

from octavo.common.files import Signature, signature
from octavo.common.tls import Tls, TlsError

log = structlog.get_logger(__name__)


def server_context(tls: Tls) -> ssl.SSLContext:
    """Makes a server's context; files that change hold for all connections that come then.

    With `ca`, clients must have a certificate of it.

    Raises:
        TlsError: The files cannot be used.
    """
    seen = signature(*tls.files)
    first = _context(tls)
    first.sni_callback = _Reloading(tls, first, seen)
    return first


class _Reloading:
    """Called at each handshake, whether or not the client names a server."""

    def __init__(self, tls: Tls, first: ssl.SSLContext, seen: Signature) -> None:
        self._tls = tls
        self._current = first
        self._seen = seen

    def __call__(
        self,
        connection: ssl.SSLObject,
        name: str | None,  # noqa: ARG002 - all names have one certificate
        context: ssl.SSLContext,
    ) -> None:
        now = signature(*self._tls.files)
        if now != self._seen:
            self._seen = now
            try:
                self._current = _context(self._tls)
            except TlsError as error:
                log.warning("certificate_not_reloaded", reason=str(error))
            else:
                log.info("certificate_reloaded", file=str(self._tls.cert))
        if self._current is not context:
            connection.context = self._current


def _context(tls: Tls) -> ssl.SSLContext:
    tls.read()  # says what is wrong
    assert tls.cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    context.load_cert_chain(tls.cert, tls.key, password="")
    if tls.ca is not None:
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
