"""`octavo embed`: the embedding of each text of a file."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Annotated, Any

import typer

from octavo.cli.connection import Server, with_server
from octavo.cli.local_server import local_server
from octavo.cli.output import fail, failures
from octavo.client import Embeddings
from octavo.offline.in_order import in_order

BATCH = 64
"""Texts of a request."""
IN_FLIGHT = 8
"""Requests at once."""

Row = dict[str, Any]


@with_server
def embed(
    server: Server,
    texts: Annotated[typer.FileText, typer.Argument(metavar="FILE.jsonl", help='"-": stdin.')],
    serve: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Start a server with this model, and use it."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Name of the model; needed if several are served.")
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(min=1, help="Number of leading dimensions. Default: all.")
    ] = None,
    prompt_name: Annotated[
        str | None, typer.Option(help="The model's prompt before each text. Default: its own.")
    ] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = (
        False
    ),
) -> None:
    """Embed the texts of a file, and write them with their embeddings to stdout, in order.

    A line is a text as a JSON string, or a JSON object whose member `text` is one. A line of the
    result is an object with the members of its line, and `embedding`.
    """
    with ExitStack() as stack:
        if serve is not None:
            server = Server(stack.enter_context(local_server(serve, socket=True)))
        stack.enter_context(failures(server.address))
        client = stack.enter_context(server.client())
        request = partial(
            client.embed,
            model=model,
            dimensions=dimensions,
            prompt_name=prompt_name,
            truncate=truncate,
        )
        for row in _embedded(_rows(texts), request):
            typer.echo(json.dumps(row, ensure_ascii=False))


def _rows(lines: Iterable[str]) -> Iterator[Row]:
    """Yield the object of each line.

    Raises:
        typer.Exit: A line is neither a text nor an object with one.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        row = {"text": row} if isinstance(row, str) else row
        if not (isinstance(row, dict) and isinstance(row.get("text"), str)):
            raise fail(f"line {number} is neither a JSON string nor an object with a text `text`")
        yield row


def _embedded(rows: Iterator[Row], request: Callable[[list[str]], Embeddings]) -> Iterator[Row]:
    """Yield rows with their embeddings, in order; read only some requests ahead."""

    def answer(batch: list[Row]) -> list[Row]:
        embeddings = request([row["text"] for row in batch]).embeddings
        pairs = zip(batch, embeddings, strict=True)
        return [row | {"embedding": embedding.tolist()} for row, embedding in pairs]

    batches = iter(lambda: list(itertools.islice(rows, BATCH)), [])
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        started = (threads.submit(answer, batch) for batch in batches)
        for answered in in_order(started, IN_FLIGHT):
            yield from answered.result()
