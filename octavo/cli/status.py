"""`octavo status`: show models and load."""

import dataclasses
import json
import time
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from octavo.cli.connection import Server, with_server
from octavo.cli.output import bar, failures, number_table, out, warning
from octavo.client import Client, Error, Model
from octavo.common.shutdown import INTERRUPTED

TIMEOUT = 5.0


@with_server
def status(
    server: Server,
    once: Annotated[bool, typer.Option("--once", help="Print the status once and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the status once as JSON.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
) -> None:
    """Show the models, their engines, requests and KV-cache use; live on a terminal."""
    with failures(server.address), server.client() as client:
        if as_json:
            typer.echo(_json(client))
        elif once or not out.is_terminal:
            out.print(_view(client))
        else:
            _follow(client, interval)


def _follow(client: Client, interval: float) -> None:
    """Redraw until ctrl-C; show an error while the server is unreachable."""
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
    """Return the server's health, and two tables of models."""
    models = client.list_models(timeout=TIMEOUT)
    serving = client.is_serving(timeout=TIMEOUT)
    health = "[green]serving[/]" if serving else "[red]not serving[/]"
    head = f"[bold]{escape(client.address)}[/] {health}"
    if not models:
        return Group(head, "[dim]no engine is up[/]")
    tables: list[RenderableType] = [requests(models), "", memory(models), *drafts(models)]
    return Group(head, *tables, *map(warning, warnings(models)))


def warnings(models: tuple[Model, ...]) -> list[str]:
    """Return the engines' warnings without duplicates."""
    return sorted({text for model in models for text in model.warnings})


def requests(models: tuple[Model, ...]) -> Table:
    """Return a table of engines and requests, one row per model."""
    table = number_table(
        *("model", "state", "engines", "ranks", "kernels", "context"),
        *("running", "waiting", "swapped"),
    )
    for model in models:
        numbers = model.max_model_len, model.running, model.waiting, model.swapped
        kernels = ", ".join(model.kernels) or "-"  # older engines do not report it
        processes = model.engines, model.ranks or model.engines
        name, state = escape(model.name), escape(model.state)
        table.add_row(name, state, *map(str, processes), escape(kernels), *map(str, numbers))
    return table


def drafts(models: tuple[Model, ...]) -> list[Table]:
    """Return a table of drafted tokens, one row per model that drafts; nothing without any."""
    table = number_table("model", "drafted tokens", "accepted")
    for model in models:
        if model.drafted_tokens:
            share = f"{model.accepted_tokens / model.drafted_tokens:.0%}"
            table.add_row(escape(model.name), f"{model.drafted_tokens:,}", share)
    return [table] if table.row_count else []


def memory(models: tuple[Model, ...]) -> Table:
    """Return a table of KV-cache blocks, one row per model."""
    table = number_table("model", "cache in use", "blocks", "shared", "cached", "in swap", "waste")
    for model in models:
        table.add_row(
            escape(model.name),
            bar(model.cache_use, width=12),
            f"{model.used_blocks}/{model.total_blocks} × {model.block_size}",
            str(model.shared_blocks),
            str(model.cached_blocks),
            f"{model.used_swap_blocks}/{model.total_swap_blocks}",
            f"{model.waste:.1%}",
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
