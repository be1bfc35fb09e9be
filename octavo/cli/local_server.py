"""A server of one's own, for a demo or a measurement."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from octavo.cli.connection import Server
from octavo.cli.output import err, fail
from octavo.common.ports import free_port

START_SECONDS = 600.0  # a model may have to be compiled
STOP_SECONDS = 40.0
PLAIN = Server()
TAIL_LINES = 25
"""How much of the server's log is shown when it does not start."""


@contextlib.contextmanager
def local_server(model: str, *arguments: str, like: Server = PLAIN) -> Iterator[str]:
    """Runs `octavo serve` on a free port; yields its address once it is ready.

    Args:
        model: as --model takes it.
        *arguments: more flags for `octavo serve`.
        like: how to connect to it, but for its address.

    Raises:
        typer.Exit: it does not start; the end of its log has been printed.
    """
    port = free_port()
    serve = ["octavo", "serve", "--model", model, *arguments]
    command = [sys.executable, "-m", *serve, "--port", str(port), "--metrics-port", "0"]
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        log = Path(directory) / "server.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            _wait(process, replace(like, address=f"127.0.0.1:{port}"), log, " ".join(serve))
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], server: Server, log: Path, name: str) -> None:
    """Waits until the server is ready; shows its log if it never is."""
    started = time.monotonic()
    with err.status(f"Starting {name}…"), server.client() as client:
        while time.monotonic() - started < START_SECONDS:
            if process.poll() is not None:
                raise fail(f"{name} ended with code {process.returncode}:\n{_tail(log)}")
            if client.is_serving(timeout=1):
                err.print(f"{name} was ready after {time.monotonic() - started:.1f} s")
                return
            time.sleep(0.1)
    raise fail(f"{name} was not ready within {START_SECONDS:.0f} s:\n{_tail(log)}")


def _tail(log: Path) -> str:
    """The log's last lines."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
