"""A temporary local server for `octavo demo` and `octavo bench`."""

import contextlib
import os
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

START_SECONDS = 600.0  # a model may have to be downloaded
STOP_SECONDS = 40.0
PLAIN = Server()
TAIL_LINES = 25
"""Number of log lines to print if the server does not start."""


@contextlib.contextmanager
def local_server(model: str, *arguments: str, like: Server = PLAIN) -> Iterator[str]:
    """Run `octavo serve` on a free port; yield its address when it is ready.

    Args:
        model: The value of --model.
        *arguments: Further flags of `octavo serve`.
        like: Connection whose API key and TLS settings to use.

    Raises:
        typer.Exit: The server does not start; the end of its log is printed.
    """
    port = free_port()
    serve = ["octavo", "serve", "--model", model, *arguments]
    command = [sys.executable, "-m", *serve, "--port", str(port), "--metrics-port", "0"]
    with tempfile.TemporaryDirectory(prefix="octavo-") as directory:
        log = Path(directory) / "server.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=sink, env=_environment())
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


def _environment() -> dict[str, str]:
    """Return this process's environment without the API key of another server."""
    return {name: value for name, value in os.environ.items() if name != "OCTAVO_API_KEY"}


def _wait(process: subprocess.Popen[bytes], server: Server, log: Path, name: str) -> None:
    """Wait until the server is ready; fail with the end of its log."""
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
    """Return the last lines of the log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])
