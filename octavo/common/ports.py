"""TCP ports: finds free ones, and checks that ports are free."""

import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

UNASSIGNED = range(20_000, 32_768)
"""Ports outside Linux's default ephemeral range (ip_local_port_range)."""


def free_port() -> int:
    """Return a free loopback port outside the ephemeral range.

    Another process may bind it first; prefer port 0 if the server reports its port.
    """
    while True:
        port = secrets.choice(UNASSIGNED)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


FREE_PORT, NO_PORT = "a free one", "none"


@dataclass(frozen=True, slots=True)
class Listener:
    """An address to listen on, with texts for error messages.

    Attributes:
        host: A name or address of this machine; IPv6 with or without brackets.
        port: 0 for a free one.
        flag: Setting of the port.
        action: Purpose of the port, such as "serve metrics".
        zero: Meaning of port 0: `FREE_PORT` or `NO_PORT`.
        reason: Reason for this port, if the user did not choose it.
    """

    host: str
    port: int
    flag: str = "--port"
    action: str = "listen"
    zero: str = FREE_PORT
    reason: str = ""

    @property
    def address(self) -> str:
        """HOST:PORT, with IPv6 in brackets."""
        host = self.bare_host
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    @property
    def bare_host(self) -> str:
        """The host; IPv6 without brackets."""
        return self.host.strip("[]")

    @property
    def disabled(self) -> bool:
        """Whether port 0 means that nothing is served."""
        return not self.port and self.zero == NO_PORT

    def check(self) -> None:
        """Check that a server could listen here.

        Raises:
            OSError: The port is in use, or the address is not local to this machine.
        """
        try:
            family, _, _, _, address = self._resolve()
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                # Like the servers: connections that have ended do not block the port.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
                probe.listen()
        except OSError as error:
            raise self.error(error) from None

    def listen(self, backlog: int, *, shared: bool = False) -> socket.socket:
        """Return a listening socket; `::` also accepts IPv4, as in gRPC.

        Args:
            backlog: Maximum connections waiting to be accepted.
            shared: Whether other processes listen on the same port, which their parent has
                reserved.

        Raises:
            OSError: The port is in use, or the address is not local to this machine.
        """
        try:
            family, _, _, _, address = self._resolve()
            return socket.create_server(
                address,
                family=family,
                backlog=backlog,
                reuse_port=shared,
                dualstack_ipv6=address[0] == "::",
            )
        except OSError as error:
            raise self.error(error) from None

    def reserve(self) -> socket.socket:
        """Reserve the port for servers of this user that share it (SO_REUSEPORT).

        While the returned socket is open, other users cannot listen there. It does not listen
        itself, so it receives no connections. Port 0 reserves a free one.

        Raises:
            OSError: The port is in use, or the address is not local to this machine.
        """
        self.check()  # fails if another server shares this port
        family, _, _, _, address = self._resolve()
        reserved = socket.socket(family, socket.SOCK_STREAM)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind(address)
        except OSError as error:
            reserved.close()
            raise self.error(error) from None
        return reserved

    def error(self, cause: OSError) -> OSError:
        """Return the error to raise if listening failed with `cause`."""
        reason = f"; {self.reason}" if self.reason else ""
        return OSError(
            f"cannot {self.action} on {self.address} ({(cause.strerror or str(cause)).lower()})"
            f"{reason}; choose another {self.flag}, or 0 for {self.zero}"
        )

    def _resolve(self) -> tuple[Any, ...]:
        """Return one result of `socket.getaddrinfo` for the address, IPv4 before IPv6."""
        addresses = socket.getaddrinfo(self.bare_host, self.port, type=socket.SOCK_STREAM)
        return min(addresses, key=lambda meaning: meaning[0] != socket.AF_INET)


def metrics_listener(host: str, port: int) -> Listener:
    """Return the address of the metrics server."""
    return Listener(host, port, "--metrics-port", "serve metrics", NO_PORT)


def check_all(listeners: Sequence[Listener]) -> None:
    """Check that servers could listen at all of these.

    Raises:
        OSError: A port is in use, or given twice.
    """
    seen: dict[tuple[str, int], Listener] = {}
    for listener in listeners:
        if listener.disabled:
            continue
        other = seen.setdefault((listener.host, listener.port), listener)
        if other is not listener and listener.port:
            reason = f" ({listener.reason})" if listener.reason else ""
            raise OSError(
                f"{other.flag} and {listener.flag} both take port {listener.port}{reason}: "
                "choose different ports"
            )
        listener.check()
