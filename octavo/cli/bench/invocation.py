"""One invocation of `octavo bench`: find or start the server, measure, print and write results."""

import contextlib
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import grpc
import typer
import uvloop
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.cli.bench import grpc_endpoint, tables
from octavo.cli.bench.endpoint import Connection, Endpoint
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
from octavo.cli.bench.workload import BenchRequest, arrival_times, make_requests
from octavo.cli.connection import Server
from octavo.cli.local_server import local_server
from octavo.cli.output import err, fail, failures, out
from octavo.common.shutdown import INTERRUPTED
from octavo.common.version import own_version

FILE_WIDTH = 120
"""Table width in columns when stdout is no terminal."""

EXPECTED_ERRORS = {
    grpc.StatusCode.RESOURCE_EXHAUSTED.name,
    grpc.StatusCode.DEADLINE_EXCEEDED.name,
    "429 TOO_MANY_REQUESTS",
}
"""Codes of failures that an overloaded server may return."""


def measure(
    command: str,
    workload: Workload,
    plans: Sequence[Plan],
    server: Server,
    target: Target,
    objectives: Objectives | None,
    outputs: Outputs,
) -> None:
    """Run the plans one after the other, with the same requests.

    Args:
        command: The sub-command's name.
        workload: The requests.
        plans: One per run: the rate or the concurrency.
        server: The server to measure, unless one is started.
        target: The model, and the server to start if any.
        objectives: Latency objectives for goodput.
        outputs: The files to write.

    Raises:
        typer.BadParameter: The flags do not fit the model or the dataset.
        typer.Exit: With code 1, no server answers or a request failed with an
            unexpected status; with code 130, ctrl-C.
    """
    date = datetime.now(UTC).isoformat(timespec="seconds")
    with _running(server, target) as running, failures(running.address):
        invocation = _Invocation(_connect(running, target), workload, plans, target, objectives)
        interrupted = False
        try:
            uvloop.run(invocation.run())
        except KeyboardInterrupt:
            interrupted = True
            err.print("[yellow]interrupted[/]: partial results follow")
        if not invocation.runs:
            raise typer.Exit(INTERRUPTED)
        report = Report(
            version=own_version(),
            command=command,
            date=date,
            client=f"{platform.platform()}, {os.cpu_count()} CPUs",
            model=invocation.model_name,
            workload=workload,
            target=target,
            objectives=objectives,
            runs=tuple(invocation.runs),
            interrupted=interrupted,
        )
        _deliver(report, outputs)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if any(_went_wrong(run) for run in report.runs):
        raise typer.Exit(1)


@contextlib.contextmanager
def _running(server: Server, target: Target) -> Iterator[Server]:
    """Yield the server to measure: the given one, or one started for the run."""
    if target.serve is None:
        yield server
    else:
        with local_server(target.serve, *target.server_flags, like=server) as address:
            yield replace(server, address=address)


def _connect(server: Server, target: Target) -> Connection:
    """Return the connection to a server: HTTP if the target has a URL, else gRPC."""
    if target.url is None:
        return grpc_endpoint.connect(server)
    from octavo.cli.bench import openai_endpoint  # noqa: PLC0415 - not needed for gRPC

    return openai_endpoint.connect(target.url, server.api_key)


class _Invocation:
    """The runs of one invocation; `runs` keeps results after an interrupt."""

    def __init__(
        self,
        connection: Connection,
        workload: Workload,
        plans: Sequence[Plan],
        target: Target,
        objectives: Objectives | None,
    ) -> None:
        self.runs: list[Run] = []
        self.model_name = ""
        self._connection = connection
        self._workload = workload
        self._plans = plans
        self._target = target
        self._objectives = objectives

    async def run(self) -> None:
        """Run all plans."""
        async with self._connection as endpoint:
            model = await endpoint.find_model(self._target.model)
            self.model_name = model.name
            requests = make_requests(self._workload, model)
            _check_concurrency(self._plans, len(requests))
            for plan in self._plans:
                await self._warm_up(endpoint, requests)
                await self._carry_out(endpoint, plan, requests)
                if len(self._plans) > 1:
                    err.print(tables.line(self.runs[-1]), soft_wrap=True)

    async def _warm_up(self, endpoint: Endpoint, requests: Sequence[BenchRequest]) -> None:
        """Send the first requests one by one, without measuring them."""
        load = self._load(endpoint)
        await load.send_closed(requests[: self._target.warmup], 1)

    async def _carry_out(
        self, endpoint: Endpoint, plan: Plan, requests: Sequence[BenchRequest]
    ) -> None:
        """Run a plan and add its results, also after an interrupt."""
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
            load = self._load(endpoint, advance)
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

    def _load(self, endpoint: Endpoint, on_end: Callable[[Record], None] = lambda _: None) -> Load:
        return Load(
            endpoint,
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
    """Check that no concurrency exceeds the number of requests.

    Raises:
        typer.BadParameter: A concurrency exceeds it.
    """
    for plan in plans:
        if isinstance(plan, Closed) and (plan.concurrency or 1) > count:
            raise typer.BadParameter(
                f"-c {plan.concurrency} exceeds the {count} requests; "
                f"set -r to {plan.concurrency} or more"
            )


def _deliver(report: Report, outputs: Outputs) -> None:
    """Print the tables and notes, and write the files."""
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
    """Write a file and print its path.

    Raises:
        typer.Exit: The file cannot be written.
    """
    try:
        write(path)
    except OSError as error:
        raise fail(f"{path}: {error.strerror or error}") from None
    err.print(f"[dim]written to {path}[/]", soft_wrap=True)


def _went_wrong(run: Run) -> bool:
    """Return whether no request succeeded or one failed with an unexpected status."""
    return not run.figures.requests or not run.figures.errors.keys() <= EXPECTED_ERRORS
