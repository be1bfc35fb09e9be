"""`octavo status`: what is served and how busy it is."""

import dataclasses
import json
import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from octavo.cli.generate import Address
from octavo.cli.output import INTERRUPTED, bar, failures, out
from octavo.client import Client, Error, Model
from octavo.client.channel import DEFAULT_ADDRESS

TIMEOUT = 5.0


def status(
    address: Address = DEFAULT_ADDRESS,
    once: Annotated[bool, typer.Option("--once", help="Print it once and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print it once, as JSON.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show the models, their engines, requests and KV-cache use; live on a terminal."""
    with failures(address), Client(address) as client:
        if as_json:
            typer.echo(_json(client))
        elif once or not out.is_terminal:
            out.print(_view(client))
        else:
            _follow(client, interval)


def _follow(client: Client, interval: float) -> None:
    """Redraws until ctrl-C; a server that goes away is shown as such."""
    view = _view(client)
    try:
        with Live(view, console=out, auto_refresh=False) as live:
            while True:
                live.update(view, refresh=True)
                time.sleep(interval)
                try:
                    view = _view(client)
                except Error as error:
                    view = f"[bold red]{error.code.name}[/]: {escape(error.message)}"
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _view(client: Client) -> RenderableType:
    """The models as a table, under a line on the server's health."""
    models = client.list_models(timeout=TIMEOUT)
    serving = client.is_serving(timeout=TIMEOUT)
    health = "[green]serving[/]" if serving else "[red]not serving[/]"
    head = f"[bold]{escape(client.address)}[/] {health}"
    return Group(head, table(models) if models else "[dim]no engine is up[/]")


def table(models: tuple[Model, ...]) -> Table:
    """One row a model."""
    table = Table("model", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("engines", "running", "waiting", "swapped", "context"):
        table.add_column(name, justify="right")
    table.add_column("cache in use", no_wrap=True)
    table.add_column("blocks", justify="right")
    for model in models:
        used = model.total_blocks - model.free_blocks
        table.add_row(
            escape(model.name),
            str(model.engines),
            str(model.running),
            str(model.waiting),
            str(model.swapped),
            str(model.max_model_len),
            bar(model.cache_use, width=12),
            f"{used}/{model.total_blocks} × {model.block_size}",
        )
    return table


def _json(client: Client) -> str:
    models = client.list_models(timeout=TIMEOUT)
    return json.dumps(
        {
            "address": client.address,
            "serving": client.is_serving(timeout=TIMEOUT),
            "models": [dataclasses.asdict(model) for model in models],
        }
    )
