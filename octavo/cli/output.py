"""Output of commands: results on stdout, messages on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octavo.client import Delta, Error, Event, Loading, UnauthenticatedError, UnavailableError
from octavo.client.address import DEFAULT_PORT
from octavo.common.proxies import proxy_variable
from octavo.common.shutdown import INTERRUPTED

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


class OutputPrinter:
    """Prints the pieces of an output as they arrive: text to stdout, reasoning dimmed to stderr."""

    def __init__(self) -> None:
        self._reasoning = False
        self._loading = False

    def show(self, event: Event) -> None:
        """Print a piece, or once that the model is being loaded."""
        match event:
            case Delta():
                self._show_piece(event)
            case Loading() if not self._loading:
                self._loading = True
                err.print(f"[dim]loading {escape(event.model)}…[/]")

    def _show_piece(self, delta: Delta) -> None:
        if delta.reasoning:
            self._reasoning = True
            err.out(delta.reasoning, end="", style="dim")
        if delta.text:
            self.end()
            out.out(delta.text, end="")

    def end(self) -> None:
        """End the line of reasoning, if it was printed last."""
        if self._reasoning:
            self._reasoning = False
            err.out("\n")


def number_table(first: str, *names: str) -> Table:
    """Return an empty table with a column of names, and columns of numbers."""
    table = Table(first, box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


@contextmanager
def failures(address: str) -> Iterator[None]:
    """Report errors of the server at `address` and exit with code 1."""
    try:
        yield
    except Error as error:
        report(error, address)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # stdout's reader closed the pipe
        sys.stderr.close()
        raise typer.Exit(1) from None


def report(error: Error, address: str) -> None:
    """Print an error's code and message, and a remedy."""
    err.print(f"[bold red]{error.code.name}[/]: {escape(error.message)}", soft_wrap=True)
    for violation in error.violations:
        if violation.description not in error.message:
            err.print(f"  {escape(violation.field)}: {escape(violation.description)}")
    if error.retry_after is not None:
        err.print(f"  try again in {error.retry_after:.1f} s")
    if isinstance(error, UnauthenticatedError):
        err.print("  set the API key in OCTAVO_API_KEY or with --api-key")
    elif isinstance(error, UnavailableError) and (variable := proxy_variable(address)):
        err.print(
            f"  {variable} is set, so the connection to {escape(address)} used its proxy; add the "
            "host to no_proxy if the proxy cannot reach it",
            soft_wrap=True,
        )
    elif isinstance(error, UnavailableError) and "handshake failed" in error.message:
        err.print(
            f"  {escape(address)} does not use TLS, or its certificate has another authority "
            "or name (set --ca, --tls-name)",
            soft_wrap=True,
        )
    elif isinstance(error, UnavailableError) and "parsing HTTP/2" in error.message:
        err.print(
            f"  {escape(address)} answers, but speaks no gRPC; set --address to the server's "
            f"--port (default {DEFAULT_PORT}), not its --http-port or --metrics-port",
            soft_wrap=True,
        )
    elif isinstance(error, UnavailableError) and "failed to connect" in error.message:
        err.print(
            f"  nothing answers at {escape(address)}, or it uses TLS (set --tls or --ca); start a "
            "server with [bold]octavo serve demo[/], or set --address",
            soft_wrap=True,
        )


def fail(message: str) -> typer.Exit:
    """Print an error message; return the exception to raise."""
    err.print(f"[bold red]error[/]: {escape(message)}", soft_wrap=True)
    return typer.Exit(1)


def warning(text: str) -> str:
    """Return a warning line as markup."""
    return f"[bold yellow]warning[/]: {escape(text)}"


def bar(share: float, width: int = 20) -> str:
    """Return a bar of `width` cells, filled up to `share` (0 to 1) and coloured by it."""
    full = round(min(max(share, 0.0), 1.0) * width)
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return f"[{colour}]{'█' * full}[/][dim]{'░' * (width - full)}[/] {share:4.0%}"
