"""The command `octavo`: one file per command.

Nothing here imports torch; the serving commands import it when they run.
"""

import signal
from typing import Annotated

import typer

from octavo.cli.batch import batch
from octavo.cli.bench import bench
from octavo.cli.chat import chat
from octavo.cli.check import check
from octavo.cli.demo import demo
from octavo.cli.embed import embed
from octavo.cli.engine import engine
from octavo.cli.generate import generate
from octavo.cli.health import health
from octavo.cli.key import key
from octavo.cli.options import EPILOG
from octavo.cli.pull import pull
from octavo.cli.router import router
from octavo.cli.serve import serve
from octavo.cli.status import status
from octavo.cli.types_in_help import Command, Group, name_types
from octavo.common.version import own_version

app = typer.Typer(
    cls=Group,
    help="Serve language models over gRPC with a paged KV cache.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    rich_markup_mode="rich",
)

for _command in (serve, router, engine):
    app.command(rich_help_panel="Serve", epilog=EPILOG, cls=Command)(name_types(_command))
for _command in (pull, check, generate, chat, batch, embed, status, health, demo, key):
    app.command(rich_help_panel="Use", cls=Command)(name_types(_command))
app.add_typer(bench, name="bench", rich_help_panel="Use")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octavo {own_version()}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Serve language models over gRPC with a paged KV cache."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see octavo/_environment.py
        signal.signal(signal.SIGINT, signal.default_int_handler)
