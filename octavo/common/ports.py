"""TCP ports for processes that are started together."""

import secrets
import socket

UNASSIGNED = range(20_000, 32_768)
"""Ports that Linux gives to no connection and no server by itself (ip_local_port_range)."""


def free_port() -> int:
    """A loopback port that nobody listens on now, and that nobody is given by chance.

    Someone may take it before it is used; where a server can report the port
    it chose itself (port 0), that is better.
    """
    while True:
        port = secrets.choice(UNASSIGNED)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
