"""TCP ports for processes that are started together."""

import socket


def free_port() -> int:
    """A loopback port that nobody listens on now.

    Someone may take it before it is used; where a server can report the port
    it chose itself (port 0), that is better.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
