"""Connection options, for both clients."""

import grpc

from octavo.client.address import parse_address
from octavo.common import tls
from octavo.common.proxies import NO_PROXY, is_loopback

OPTIONS: tuple[tuple[str, int | str], ...] = (
    # Log-probabilities of a long prompt exceed grpc's default of 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Reconnect to a restarted server within seconds, not minutes.
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

Metadata = tuple[tuple[str, str | bytes], ...]


def locate(address: str, files: tls.Tls | None) -> tuple[str, tls.Tls | None]:
    """Return an address as HOST:PORT, and the TLS files; https:// alone uses public authorities.

    Raises:
        ValueError: The address is malformed, or it is http:// but TLS files are given.
    """
    target, wants_tls = parse_address(address)
    if files is not None and address.strip().lower().startswith("http://"):
        raise ValueError(f"{address!r} is without TLS, but TLS is set: use https:// or HOST:PORT")
    return target, tls.Tls() if wants_tls and files is None else files


def secure(
    target: str, files: tls.Tls | None, credentials: grpc.ChannelCredentials | None
) -> tuple[grpc.ChannelCredentials | None, tuple[tuple[str, int | str], ...]]:
    """Return a channel's credentials, None for plaintext, and its options.

    Connections to this machine never use a proxy.

    Raises:
        TlsError: The files cannot be used.
        ValueError: Both `tls` and `credentials` are given.
    """
    options = OPTIONS
    if is_loopback(target.rpartition(":")[0]):
        options = (*options, NO_PROXY)
    if files is None:
        return credentials, options
    if credentials is not None:
        raise ValueError("tls and credentials exclude each other: give one of them")
    return tls.channel_credentials(files), (*options, *tls.channel_options(files))


def with_key(metadata: Metadata, api_key: str | None) -> Metadata:
    """Return the metadata to send with each call."""
    if api_key is None:
        return metadata
    return (*metadata, ("authorization", f"Bearer {api_key}"))
