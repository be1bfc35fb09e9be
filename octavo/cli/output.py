"""What commands print: answers on stdout, everything about them on stderr."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from octavo.client import Error, UnauthenticatedError, UnavailableError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

INTERRUPTED = 130
"""The exit code of a command that ctrl-C ended, as shells expect it."""


@contextmanager
def failures(address: str) -> Iterator[None]:
    """Turns errors of a server at `address` into a message and exit code 1."""
    try:
        yield
    except Error as error:
        report(error, address)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our output has gone; so do we
        sys.stderr.close()
        raise typer.Exit(1) from None


def report(error: Error, address: str) -> None:
    """Prints an error's code, message and what to do next."""
    err.print(f"[bold red]{error.code.name}[/]: {escape(error.message)}", soft_wrap=True)
    for violation in error.violations:
        if violation.description not in error.message:
            err.print(f"  {escape(violation.field)}: {escape(violation.description)}")
    if error.retry_after is not None:
        err.print(f"  try again in {error.retry_after:.1f} s")
    if isinstance(error, UnauthenticatedError):
        err.print("  a key goes into OCTAVO_API_KEY, or after --api-key")
    elif isinstance(error, UnavailableError) and "handshake failed" in error.message:
        err.print(
            f"  {escape(address)} does not speak TLS, or its certificate is of another authority "
            "or for another name (--ca, --tls-name)",
            soft_wrap=True,
        )
    elif isinstance(error, UnavailableError) and "failed to connect" in error.message:
        err.print(
            f"  nothing answers at {escape(address)}, or it speaks TLS (--tls, --ca); start a "
            "server with [bold]octavo serve --model demo[/], or name one with --address",
            soft_wrap=True,
        )


def fail(message: str) -> typer.Exit:
    """Prints a message in red; raise what it returns."""
    err.print(f"[bold red]error[/]: {escape(message)}", soft_wrap=True)
    return typer.Exit(1)


def warning(text: str) -> str:
    """Return a line that warns of something, as markup."""
    return f"[bold yellow]warning[/]: {escape(text)}"


def bar(share: float, width: int = 20) -> str:
    """A bar of `width` cells, `share` (0 to 1) of them full, coloured by how full."""
    full = round(min(max(share, 0.0), 1.0) * width)
    colour = "green" if share < 0.7 else "yellow" if share < 0.9 else "red"
    return f"[{colour}]{'█' * full}[/][dim]{'░' * (width - full)}[/] {share:4.0%}"
