"""Parsing of a server's address, for both clients and the commands."""

import re

DEFAULT_PORT = 50051
"""Default port of `octavo serve` and `octavo router`."""
DEFAULT_ADDRESS = f"localhost:{DEFAULT_PORT}"
URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.IGNORECASE)
GRPC_TARGET = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):", re.IGNORECASE)
"""Schemes of gRPC's own name resolvers."""
HOST_AND_PORT = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+(%\w+)?\]|[\w.-]*)(:(?P<port>[0-9]+))?")


def parse_address(address: str) -> tuple[str, bool]:
    """Return a server's address as HOST:PORT, and whether it requires TLS.

    `address` is HOST:PORT, HOST, :PORT, or one of these after http:// or https://. The default host
    is localhost, the default port `DEFAULT_PORT`; https:// requires TLS. gRPC's own targets, such
    as unix:/PATH or dns:///HOST:PORT, are returned unchanged.

    Raises:
        ValueError: The address has none of these forms; the message lists them.
    """
    text = address.strip()
    if match := URL.fullmatch(text):
        scheme = match["scheme"].lower()
        if scheme in {"http", "https"}:
            return _host_and_port(match["rest"], address), scheme == "https"
    if GRPC_TARGET.match(text) and not re.fullmatch(r"[\w-]+:\d+", text):
        return text, False
    if match:
        raise _wrong(address, f"{match['scheme']}:// is not supported")
    return _host_and_port(text, address), False


def _host_and_port(text: str, address: str) -> str:
    """Return HOST:PORT, with defaults for missing parts.

    Raises:
        ValueError: `text` is not an address.
    """
    text, _, path = text.partition("/")
    if path:
        raise _wrong(address, f"it has a path, /{path}")
    if text.count(":") > 1 and not text.startswith("["):
        text = f"[{text}]"  # a bare IPv6 address
    match = HOST_AND_PORT.fullmatch(text)
    if not text or match is None:
        raise _wrong(address, f"{text!r} is not a host and port")
    host, port = match["host"] or "localhost", int(match["port"] or DEFAULT_PORT)
    if not 0 < port < 1 << 16:
        raise _wrong(address, f"{port} is not a port; ports are 1 to 65535")
    return f"{host}:{port}"


def _wrong(address: str, why: str) -> ValueError:
    return ValueError(
        f"{address!r} is not the address of a gRPC server: {why}. Use HOST:PORT, such as "
        f"{DEFAULT_ADDRESS}, with https:// before it for TLS; the default port is {DEFAULT_PORT}"
    )
