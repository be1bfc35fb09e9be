"""One call of `octavo bench`: finds or starts the server, measures, shows and keeps the results."""

import contextlib
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import grpc
import typer
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.cli.bench import tables
from octavo.cli.bench.load import Load
from octavo.cli.bench.metrics import Record, compute_figures
from octavo.cli.bench.report import Report, Run, to_json
from octavo.cli.bench.settings import (
    Closed,
    Objectives,
    Open,
    Outputs,
    Plan,
    Target,
    Workload,
)
from octavo.cli.bench.workload import Request, arrival_times, make_requests
from octavo.cli.connection import Server
from octavo.cli.local_server import local_server
from octavo.cli.output import INTERRUPTED, err, fail, failures, out
from octavo.client import AsyncClient, Model, NotFoundError, UnavailableError

LOOKUP_SECONDS = 5.0

FILE_WIDTH = 120
"""Columns that a table may have where no terminal limits it."""

EXPECTED_ERRORS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED.name,
    grpc.StatusCode.DEADLINE_EXCEEDED.name,
}
"""What a server under load is right to answer."""


def measure(
    command: str,
    workload: Workload,
    plans: Sequence[Plan],
    server: Server,
    target: Target,
    objectives: Objectives | None,
    outputs: Outputs,
) -> None:
    """Carries out the plans, one after the other, with the same requests.

    Args:
        command: the sub-command's name.
        workload: what is sent.
        plans: how it is sent.
        server: where it is sent, unless a server is started.
        target: what is measured there.
        objectives: what counts as goodput.
        outputs: where results go besides the terminal.

    Raises:
        typer.BadParameter: the flags do not fit the model or the dataset.
        typer.Exit: with code 1, there is no server or a request failed that
            should not have; with code 130, ctrl-C.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with _running(server, target) as found, failures(found.address):
        session = _Session(found, workload, plans, target, objectives)
        interrupted = False
        try:
            uvloop.run(session.run())
        except KeyboardInterrupt:
            interrupted = True
            err.print("[yellow]interrupted[/]: what was measured so far")
        if not session.runs:
            raise typer.Exit(INTERRUPTED)
        report = Report(
            version=version("octavo"),
            command=command,
            date=date,
            client=f"{platform.platform()}, {os.cpu_count()} CPUs",
            model=session.model_name,
            workload=workload,
            target=target,
            objectives=objectives,
            runs=tuple(session.runs),
            interrupted=interrupted,
        )
        _deliver(report, outputs)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(_went_wrong(run) for run in report.runs):
        raise typer.Exit(1)


@contextlib.contextmanager
def _running(server: Server, target: Target) -> Iterator[Server]:
    """Yields the server to measure: the one named, or one that is started for it."""
    if target.serve is None:
        yield server
    else:
        with local_server(target.serve, *target.server_flags, like=server) as address:
            yield replace(server, address=address)


class _Session:
    """The measuring itself; `runs` are there even if it is cut off."""

    def __init__(
        self,
        server: Server,
        workload: Workload,
        plans: Sequence[Plan],
        target: Target,
        objectives: Objectives | None,
    ) -> None:
        self.runs: list[Run] = []
        self.model_name = ""
        self._server = server
        self._workload = workload
        self._plans = plans
        self._target = target
        self._objectives = objectives

    async def run(self) -> None:
        """Carries out all plans."""
        async with self._server.async_client() as client:
            model = await self._find_model(client)
            self.model_name = model.name
            requests = make_requests(self._workload, model)
            _check_concurrency(self._plans, len(requests))
            for plan in self._plans:
                await self._warm_up(client, requests)
                await self._carry_out(client, plan, requests)
                if len(self._plans) > 1:
                    err.print(tables.line(self.runs[-1]), soft_wrap=True)

    async def _find_model(self, client: AsyncClient) -> Model:
        """The model to measure: the one named, else the first.

        Raises:
            typer.Exit: nothing answers.
            NotFoundError: there is no such model.
        """
        try:
            models = await client.list_models(timeout=LOOKUP_SECONDS)
        except UnavailableError as error:
            if "failed to connect" not in error.message:
                raise
            raise fail(
                f"nothing answers at {self._server.address}: start a server with `octavo serve`, "
                "name one with --address, or let bench start one with --serve demo"
            ) from None
        name = self._target.model
        for model in models:
            if name in (None, model.name):
                return model
        served = ", ".join(model.name for model in models) or "none"
        raise NotFoundError(
            grpc.StatusCode.NOT_FOUND,
            f"no model {name!r}; served: {served}" if name else "no model is served yet",
        )

    async def _warm_up(self, client: AsyncClient, requests: Sequence[Request]) -> None:
        """Sends the first requests, one by one, and forgets them."""
        load = self._load(client)
        await load.send_closed(requests[: self._target.warmup], 1)

    async def _carry_out(
        self, client: AsyncClient, plan: Plan, requests: Sequence[Request]
    ) -> None:
        """Adds a run, a part of one if it is cut off."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
        )
        with Progress(
            *columns,
            console=err,
            transient=True,
            refresh_per_second=4,
            disable=not err.is_terminal,
        ) as progress:
            bar = progress.add_task(tables.describe(plan), total=len(requests), rate="")
            tokens = 0

            def advance(record: Record) -> None:
                nonlocal tokens
                tokens += record.output_tokens
                rate = f"{tokens / load.seconds:.0f} tokens/s"
                progress.update(bar, advance=1, rate=rate)

            cpu = time.process_time()
            load = self._load(client, advance)
            try:
                match plan:
                    case Open():
                        times = arrival_times(plan, len(requests), self._workload.seed)
                        await load.send_open(requests, times.tolist())
                    case Closed(concurrency=limit):
                        await load.send_closed(requests, limit or len(requests))
            finally:
                cpu = time.process_time() - cpu
                self.runs.append(self._sum_up(plan, load, cpu))

    def _load(self, client: AsyncClient, on_end: Callable[[Record], None] = lambda _: None) -> Load:
        return Load(
            client,
            self.model_name,
            salt=secrets.token_hex(8),
            timeout=self._target.timeout,
            on_end=on_end,
        )

    def _sum_up(self, plan: Plan, load: Load, cpu_seconds: float) -> Run:
        unfinished = load.sent - len(load.records)
        records = sorted(load.records, key=lambda record: record.index)
        ended = max((record.ended for record in records), default=0.0)
        figures = compute_figures(
            records,
            seconds=load.seconds if unfinished else ended,
            cpu_seconds=cpu_seconds,
            unfinished=unfinished,
            objectives=self._objectives,
        )
        return Run(plan, figures, tuple(records))


def _check_concurrency(plans: Sequence[Plan], count: int) -> None:
    """Refuses a concurrency that the requests are too few for.

    Raises:
        typer.BadParameter: there is one.
    """
    for plan in plans:
        if isinstance(plan, Closed) and (plan.concurrency or 1) > count:
            raise typer.BadParameter(
                f"-c {plan.concurrency}: {count} requests cannot keep as many in flight; "
                f"-r {plan.concurrency} or more can"
            )


def _deliver(report: Report, outputs: Outputs) -> None:
    """Prints the tables, writes the files and says what failed."""
    console = err if outputs.json == "-" else out
    width = None if console.is_terminal else max(console.width, FILE_WIDTH)
    for part in tables.render(report):
        console.print(part, width=width)
    for run in report.runs:
        for text in tables.notes(run):
            err.print(text, soft_wrap=True)
    if outputs.json == "-":
        typer.echo(to_json(report))
    elif outputs.json is not None:
        _write(Path(outputs.json), lambda path: path.write_text(to_json(report) + "\n"))
    if outputs.plot is not None:
        from octavo.cli.bench import plots  # noqa: PLC0415 - matplotlib is an extra

        _write(outputs.plot, lambda path: plots.save(report, path))


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file and says so.

    Raises:
        typer.Exit: it cannot be written; what was measured has been printed.
    """
    try:
        write(path)
    except OSError as error:
        raise fail(f"{path}: {error.strerror or error}") from None
    err.print(f"[dim]written to {path}[/]", soft_wrap=True)


def _went_wrong(run: Run) -> bool:
    """Whether nothing succeeded, or something failed that load does not excuse."""
    return not run.figures.requests or not run.figures.errors.keys() <= EXPECTED_ERRORS
