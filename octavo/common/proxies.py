"""Loopback addresses, and the HTTP proxy that gRPC takes to other ones."""

import ipaddress
import os

NO_PROXY = ("grpc.enable_http_proxy", 0)
"""The channel argument that ignores the proxy of the environment."""
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Environment variables in which gRPC looks for a proxy, in its order; only in lower case."""


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_variable(target: str) -> str | None:
    """Return the environment variable by whose proxy gRPC goes to HOST:PORT; None for none.

    It does not consider the hosts that `no_proxy` excludes.
    """
    if is_loopback(target.rpartition(":")[0]):
        return None
    return next((name for name in VARIABLES if os.environ.get(name)), None)
