"""A temporary local server for `octavo demo` and `octavo bench`."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from octavo.cli.connection import Server
from octavo.cli.output import err, fail
from octavo.common.ports import free_port
from octavo.offline.server import ChildServer, ServerError

START_SECONDS = 600.0  # a model may have to be downloaded
PLAIN = Server()


@contextlib.contextmanager
def local_server(
    model: str, *arguments: str, like: Server = PLAIN, socket: bool = False
) -> Iterator[str]:
    """Run `octavo serve` on a free port or a socket; yield its address when it is ready.

    Args:
        model: A Hub name, a directory, a GGUF file or `demo`.
        *arguments: Flags of `octavo serve`.
        like: Connection whose API key and TLS settings to use.
        socket: Whether it listens on a Unix socket of this user only.

    Raises:
        typer.Exit: The server does not start; the end of its log is printed.
    """
    began = time.monotonic()
    try:
        with err.status(f"Starting octavo serve {model}…"):
            server = ChildServer(
                model,
                arguments,
                START_SECONDS,
                port=None if socket else free_port(),
                client=lambda address: replace(like, address=address).client(),
            )
    except ServerError as error:
        raise fail(str(error)) from None
    try:
        err.print(f"{server.command} was ready after {time.monotonic() - began:.1f} s")
        yield server.address
    finally:
        server.close()
