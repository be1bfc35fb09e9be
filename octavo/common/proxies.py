"""Detects loopback addresses, and the HTTP proxy that gRPC uses for others."""

import ipaddress
import os

NO_PROXY = ("grpc.enable_http_proxy", 0)
"""Channel argument that ignores the environment's proxy."""
VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Environment variables that gRPC reads for a proxy, in its order; lower case only."""


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address or name."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_variable(target: str) -> str | None:
    """Return the variable with the proxy that gRPC uses for HOST:PORT; None if it uses none.

    It ignores `no_proxy`.
    """
    if is_loopback(target.rpartition(":")[0]):
        return None
    return next((name for name in VARIABLES if os.environ.get(name)), None)
