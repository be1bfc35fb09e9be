"""TCP ports for processes that are started together."""

import secrets
import socket

UNASSIGNED = range(20_000, 32_768)
"""Ports outside Linux's default ephemeral range (ip_local_port_range)."""


def free_port() -> int:
    """Return a free loopback port outside the ephemeral range.

    Another process may take it first; prefer port 0 where the server reports its own port.
    """
    while True:
        port = secrets.choice(UNASSIGNED)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
