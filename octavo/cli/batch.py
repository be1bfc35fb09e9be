"""`octavo batch`: requests from a file to a file, in the format of OpenAI's batches."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from octavo.cli.extras import require
from octavo.cli.output import err, fail
from octavo.common.sampling_parameters import MAX_PRIORITY
from octavo.common.shutdown import INTERRUPTED
from octavo.offline.batch_files import BatchFileError, BatchFiles, is_answer
from octavo.offline.server import ChildServer, ServerError


class Summary:
    """Counts of a batch's results."""

    def __init__(self, done: int) -> None:
        self.before = done
        self.completed = self.failed = self.prompt_tokens = self.output_tokens = 0
        self._began = time.monotonic()

    def add(self, result: dict[str, Any]) -> None:
        """Count a result."""
        if not is_answer(result):
            self.failed += 1
            return
        self.completed += 1
        usage = result["response"]["body"].get("usage") or {}
        self.prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.output_tokens += usage.get("completion_tokens", usage.get("output_tokens", 0))

    def __str__(self) -> str:
        seconds = max(time.monotonic() - self._began, 1e-9)
        before = f", {self.before} before" if self.before else ""
        return (
            f"{self.completed} completed, {self.failed} failed{before}; "
            f"{self.prompt_tokens} + {self.output_tokens} tokens in {seconds:.1f} s, "
            f"{self.output_tokens / seconds:.0f} tokens/s"
        )


def batch(
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", exists=True, dir_okay=False)],
    results: Annotated[Path, typer.Argument(metavar="OUT.jsonl", dir_okay=False)],
    server_flags: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- SERVER FLAGS",
            help="With --serve, after `--`: flags of `octavo serve`, such as --num-blocks 512.",
            show_default=False,
        ),
    ] = None,
    serve: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Start a server with this model.")
    ] = None,
    url: Annotated[
        str, typer.Option(help="Else the server, before /v1.", envvar="OCTAVO_URL")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="The server's API key.", envvar="OCTAVO_API_KEY")
    ] = None,
    errors: Annotated[
        Path | None,
        typer.Option(help="File of failed requests. Default: OUT.errors.jsonl.", dir_okay=False),
    ] = None,
    in_flight: Annotated[int, typer.Option(min=1, help="Maximum requests at once.")] = 128,
    priority: Annotated[
        int | None,
        typer.Option(
            min=-MAX_PRIORITY,
            max=MAX_PRIORITY,
            help="Priority of requests that have none. Default: the server's.",
        ),
    ] = None,
) -> None:
    """Run a file of requests in OpenAI's batch format; the same command goes on after a stop."""
    require("batch", "router")
    if server_flags and serve is None:
        raise typer.BadParameter("flags of `octavo serve` need --serve")
    try:
        with (
            BatchFiles(requests, results, errors or results.with_suffix(".errors.jsonl")) as files,
            _running(serve, server_flags or [], url) as (base_url, socket),
        ):
            summary = Summary(files.done)
            try:
                asyncio.run(_run(files, summary, base_url, socket, api_key, in_flight, priority))
            finally:
                err.print(str(summary))
    except (BatchFileError, ServerError, OSError) as error:
        raise fail(str(error)) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    if summary.failed:
        raise typer.Exit(1)


@contextmanager
def _running(model: str | None, flags: list[str], url: str) -> Iterator[tuple[str, Path | None]]:
    """Yield the server's URL, and its socket if it is started here.

    Raises:
        ServerError: It did not start, or ended.
    """
    if model is None:
        yield url, None
        return
    with err.status(f"Starting octavo serve {model}…"):
        server = ChildServer(model, flags, http=True)
    try:
        yield "http://octavo", server.http_socket
    except ConnectionError:
        server.check()
        raise
    finally:
        server.close()


async def _run(
    files: BatchFiles,
    summary: Summary,
    url: str,
    socket: Path | None,
    api_key: str | None,
    in_flight: int,
    priority: int | None,
) -> None:
    import httpx2  # noqa: PLC0415 - in an extra

    from octavo.offline.batch import Batch  # noqa: PLC0415 - it imports httpx2

    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    transport = httpx2.AsyncHTTPTransport(
        uds=None if socket is None else str(socket), limits=httpx2.Limits(max_connections=None)
    )
    client = httpx2.AsyncClient(
        base_url=url,
        headers=headers,
        transport=transport,
        trust_env=False,
        timeout=httpx2.Timeout(None, connect=30),
    )
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    async with client:
        with Progress(*columns, console=err, disable=not err.is_terminal, transient=True) as bar:
            task = bar.add_task("")

            def count(result: dict[str, Any]) -> None:
                summary.add(result)
                bar.update(task, description=str(summary))

            try:
                await Batch(client, in_flight, priority).run(files, count)
            except httpx2.TransportError as error:
                raise ConnectionError(f"nothing answers at {url}: {error}") from error
