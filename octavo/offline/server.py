"""A server in child processes of this one, for `octavo.LLM` and for commands."""

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from octavo.client import Client, UnavailableError

FlagValue = str | int | float | Path | Sequence[str | int | float | Path] | None
"""A flag's value; True and False give --NAME and --no-NAME, a sequence the flag several times."""

START_SECONDS = 3600.0
"""Default maximum of the start: a model may have to be downloaded."""
STOP_SECONDS = 40.0
POLL_SECONDS = 0.1
TAIL_LINES = 25
"""Number of log lines in the error if the server does not start, or ends."""


class ServerError(Exception):
    """The server did not start, or has ended; the message has the end of its log."""


class ChildServer:
    """Start `octavo serve` in child processes, and wait until it is ready.

    It listens on a Unix socket that only this user reaches, or on a port. `close` stops it; so does
    the end of this process, even by SIGKILL.

    Args:
        model: A Hub name, a directory, a GGUF file or `demo`.
        arguments: Flags of `octavo serve`, as on its command line.
        start_timeout: Maximum seconds until it is ready.
        port: TCP port of 127.0.0.1 to listen on, instead of the socket.
        http: Whether to serve HTTP too, on `http_socket`.
        client: Makes the client, of an address, that asks whether it is ready.

    Attributes:
        command: The command, as in error messages.
        address: The gRPC target of the router.
        http_socket: The Unix socket of its HTTP API, with `http`.

    Raises:
        ServerError: It did not start.
    """

    def __init__(
        self,
        model: str,
        arguments: Sequence[str] = (),
        start_timeout: float = START_SECONDS,
        *,
        port: int | None = None,
        http: bool = False,
        client: Callable[[str], Client] = Client,
    ) -> None:
        directory = Path(mkdtemp(prefix="octavo-"))  # mode 0700
        socket, self.http_socket = directory / "router.sock", directory / "http.sock"
        self._log = directory / "server.log"
        self.address = f"unix:{socket}" if port is None else f"127.0.0.1:{port}"
        serve = ["octavo", "serve", model, *arguments]
        self.command = " ".join(serve)
        serve += ["--uds", str(socket)] if port is None else ["--port", str(port)]
        serve += ["--http-uds", str(self.http_socket)] if http else []
        serve += ["--metrics-port", "0"]
        with self._log.open("wb") as log:
            # In a session of its own, ctrl-C does not reach it; the pipe's end ends it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "octavo.common.parent_watch", *serve],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )
        self.close = weakref.finalize(self, _stop, self._process, directory)
        try:
            self._wait(start_timeout, client)
        except BaseException:
            self.close()
            raise

    def _wait(self, seconds: float, connect: Callable[[str], Client]) -> None:
        until = time.monotonic() + seconds
        with connect(self.address) as client:
            while not client.is_serving(timeout=1):
                self.check()
                if time.monotonic() > until:
                    why = f"was not ready within {seconds:g} s"
                    raise ServerError(f"{self.command} {why}:\n{self._tail()}")
                time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """Check that the server runs.

        Raises:
            ServerError: It has ended.
        """
        if self._process.poll() is not None:
            code = self._process.returncode
            raise ServerError(f"{self.command} ended with code {code}:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-TAIL_LINES:])

    def explain(self, error: UnavailableError) -> Exception:
        """Return the server's end if that is what made a request fail, or the error itself."""
        try:
            self._process.wait(1)
            self.check()
        except (ServerError, subprocess.TimeoutExpired) as end:
            return end if isinstance(end, ServerError) else error
        return error


def command_line(flags: Mapping[str, FlagValue]) -> list[str]:
    """Return flags as a command line; a value of None leaves its flag out."""
    words = []
    for name, value in flags.items():
        option = name.replace("_", "-")
        if value is True or value is False:
            words.append(f"--{option}" if value else f"--no-{option}")
            continue
        several = isinstance(value, Sequence) and not isinstance(value, str)
        for each in value if several else [value]:  # type: ignore[union-attr] # mypy: no narrowing
            words += [] if each is None else [f"--{option}", str(each)]
    return words


def _environment() -> dict[str, str]:
    """Return this process's environment without the API key of another server."""
    return {name: value for name, value in os.environ.items() if name != "OCTAVO_API_KEY"}


def _stop(process: subprocess.Popen[bytes], directory: Path) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        assert process.stdin is not None
        process.stdin.close()  # kills it with its children
        process.wait()
        rmtree(directory, ignore_errors=True)
