"""Compare servers as the PagedAttention paper does (section 6.2): latency by request rate.

    python -m benchmarks.latency_curve [--servers octavo-bf16 vllm] [--rates 1 2 4] [--install]

All servers get the same requests at the same random times (a Poisson process) through OpenAI's HTTP
API. One rate is measured with one server after the other, before the next rate; the others are
suspended meanwhile. Prompts are random tokens, outputs are greedy and as long as asked for. Lengths
have the means of the paper's data sets; `sharegpt:0.25` divides them by four, for machines on which
whole ones take too long.

Normalized latency is a request's latency divided by its output tokens. A server holds a rate while
its median is within a limit: a multiple of what the reference needs at the lowest rate. The rate at
which it leaves the limit is interpolated between two measured ones.
"""

import argparse
import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.latency_report import Curve, Data, Point, draw, markdown, verdicts
from benchmarks.peers import model_files, registry
from benchmarks.peers.environments import InstallError
from benchmarks.peers.model_files import DIRECTORY
from benchmarks.peers.rounds import turned
from benchmarks.peers.servers import (
    KINDS,
    RunningServer,
    ServerError,
    ServerKind,
    choose,
)
from octavo.cli.bench import openai_endpoint
from octavo.cli.bench.load import Load
from octavo.cli.bench.metrics import OK, Record, compute_figures
from octavo.cli.bench.settings import Open, Shape
from octavo.cli.bench.workload import BenchRequest, arrival_times
from octavo.common.models.errors import ModelError

RESULTS = Path(__file__).parent / "results"
DEFAULTS = ("octavo-bf16", "octavo-int4", "vllm", "pace")
REFERENCE = "vllm"
GIVE_UP = 8.0
"""A server is not sent higher rates after a median of so many times the slowest first one."""
WARM_UP = 8
"""Requests at once that each server gets before its first rate."""
WARM_UP_SEED = 1_000_003
SETTLE_SECONDS = 2.0
TIMEOUT_SECONDS = 120.0


class Comparison:
    """The servers of a run, all stopped but the one that is measured.

    Args:
        options: of the command line.
        model: the model's directory.
        say: told what goes on.

    Attributes:
        curves: one for each data set.
        skipped: by a server's title, why it was not measured (any more).
    """

    def __init__(
        self, options: argparse.Namespace, model: Path, say: Callable[[str], None]
    ) -> None:
        self.curves = [Curve(data) for data in options.lengths]
        self.skipped: dict[str, str] = {}
        self._options = options
        self._model = model
        self._say = say
        self._running: dict[str, tuple[ServerKind, RunningServer]] = {}

    def run(self, done: Callable[[], None]) -> None:
        """Start all servers and measure every rate; call `done` when that ends, however it does.

        `done` is called before the servers are ended, which takes a while.
        """
        with contextlib.ExitStack() as stack:
            for kind in self._options.kinds:
                self._start(kind, stack)
            stack.callback(done)
            for curve in self.curves:
                for number, rate in enumerate(sorted(self._options.rates)):
                    for name in self._order(number):
                        self._measure(curve, name, rate)

    def _start(self, kind: ServerKind, stack: contextlib.ExitStack) -> None:
        """Start a server, warm it up and stop it; or note why that cannot be."""
        try:
            python = kind.check(self._options.folder, install=self._options.install)
            self._say(f"{kind.title}: starting")
            self._options.folder.mkdir(parents=True, exist_ok=True)
            log = self._options.folder / f"{kind.name}-server.log"
            with contextlib.ExitStack() as own:  # ends a server that is skipped
                server = own.enter_context(
                    RunningServer(kind, python, self._model, threads=self._options.threads, log=log)
                )
                server.wait_ready()
                for curve in self.curves:
                    requests = curve.data.requests(WARM_UP, WARM_UP_SEED)
                    _check(asyncio.run(send(server, requests, [0.0] * WARM_UP)), requests)
                time.sleep(SETTLE_SECONDS)
                server.pause()
                stack.push(own.pop_all())
        except (ServerError, InstallError) as error:
            self._say(f"{kind.title}: skipped: {error}")
            self.skipped[kind.title] = str(error)
        else:
            self._running[kind.name] = kind, server

    def _order(self, number: int) -> list[str]:
        """Return the servers' names, another one first for each number."""
        return turned([*self._running], number)

    def _measure(self, curve: Curve, name: str, rate: float) -> None:
        """Measure a server at one rate, unless it is long past saturation."""
        kind, server = self._running[name]
        points = curve.points.setdefault(name, [])
        firsts = [found[0].median for found in curve.points.values() if found]
        if kind.title in self.skipped or (points and points[-1].median > GIVE_UP * max(firsts)):
            return
        options = self._options
        count = max(round(rate * options.seconds), options.least)
        requests = curve.data.requests(count, options.seed)
        times = arrival_times(Open(rate), count, options.seed).tolist()
        server.resume()
        cpu, began = time.process_time(), time.perf_counter()
        records = asyncio.run(send(server, requests, times))
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        server.pause()
        try:
            _check(records, requests, may_fail=True)
        except ServerError as error:
            self.skipped[kind.title] = str(error)
            return
        point = Point(rate, compute_figures(records, seconds=seconds, cpu_seconds=cpu))
        points.append(point)
        self._say(
            f"{curve.data.title}, {rate:g}/s, {kind.title}: {point.median:.1f} ms/token,"
            f" {point.figures.output_tokens_per_s:.0f} tokens/s, failed {point.figures.errors}"
        )


async def send(
    server: RunningServer, requests: Sequence[BenchRequest], times: Sequence[float]
) -> list[Record]:
    """Send each request at its time in seconds; return what became of each, in their order."""
    async with openai_endpoint.connect(server.url, None) as endpoint:
        load = Load(endpoint, server.model, salt=secrets.token_hex(8), timeout=TIMEOUT_SECONDS)
        await load.send_open(requests, times)
    return sorted(load.records, key=lambda record: record.index)


def _check(
    records: Sequence[Record], requests: Sequence[BenchRequest], *, may_fail: bool = False
) -> None:
    """Check that every output is as long as asked for.

    Raises:
        ServerError: one is not, or a request failed and none may.
    """
    for record, request in zip(records, requests, strict=True):
        if record.code != OK:
            if not may_fail:
                raise ServerError(f"{record.code}: {record.error}")
        elif record.output_tokens != request.max_tokens:
            raise ServerError(
                f"an output has {record.output_tokens} tokens where {request.max_tokens} were asked"
            )


def main() -> None:
    """Parse the arguments, measure, and write the report and the plot."""
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as ctrl-C: report, end the servers
    load, start, date = os.getloadavg()[0], time.monotonic(), datetime.now(UTC)
    try:
        model = options.model.provide(DIRECTORY, options.folder)
    except ModelError as error:
        sys.exit(f"error: {error}")

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - start), 60)
        print(f"{minutes:3}:{seconds:02} {text}", flush=True)

    comparison = Comparison(options, model, say)
    found: list[str] = []

    def write() -> None:
        found[:] = _write(
            comparison, options, _facts(options, date, load, time.monotonic() - start)
        )

    try:
        comparison.run(write)
    except KeyboardInterrupt:
        say("interrupted; the report has what was measured until now")
    print(*found, sep="\n")
    if not found or any(not line.startswith("PASS") for line in found):
        sys.exit(1)


def _write(
    comparison: Comparison, options: argparse.Namespace, facts: tuple[str, ...]
) -> list[str]:
    """Write the report and the plot of what was measured; return the verdicts."""
    curves = [curve for curve in comparison.curves if curve.points]
    titles = {kind.name: kind.title for kind in options.kinds}
    found = verdicts(curves, titles, options.reference)
    options.output.mkdir(parents=True, exist_ok=True)
    base = options.output / "latency_curve"
    if curves:
        draw(curves, titles, options.reference, base.with_suffix(".svg"))
    page = markdown(
        *(curves, titles, options.reference),
        skipped=comparison.skipped,
        facts=[*facts, "\n".join(f"- {line}" for line in found)],
        plot=f"{base.name}.svg",
    )
    base.with_suffix(".md").write_text(page)
    return found


def _facts(
    options: argparse.Namespace, date: datetime, load: float, seconds: float
) -> tuple[str, ...]:
    """Return the report's lines on how it was measured."""
    command = shlex.join(["python", "-m", "benchmarks.latency_curve", *sys.argv[1:]])
    where = (
        f"Made by `{command}`, {date:%Y-%m-%d}, in {seconds / 60:.0f} minutes on {options.machine}."
        f" Load average before the start: {load:.1f}. Model: {options.model.title}. Each server"
        f" computed with {options.threads} threads, and the others were stopped meanwhile."
    )
    how = (
        f"At each rate, requests came for {options.seconds:g} s (at least {options.least} requests)"
        f" by a Poisson process of seed {options.seed}, the same for all servers, through OpenAI's"
        " HTTP API. Normalized latency is a request's latency divided by its output tokens."
    )
    return where, how


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.latency_curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = ", ".join(kind.name for kind in KINDS)
    parser.add_argument("--servers", nargs="*", default=DEFAULTS, help=f"some of: {names}")
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another server with OpenAI's API; {port} and {model} in its command are replaced",
    )
    parser.add_argument("--reference", default=REFERENCE, help="whose latency sets the limits")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1, 2, 3, 4, 6, 8])
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=Data.parse,
        default=[Data(Shape.SHAREGPT, 1.0), Data(Shape.ALPACA, 1.0)],
        metavar="NAME[:SCALE]",
        help="sharegpt, alpaca, each with a scale of at most 1",
    )
    parser.add_argument("--seconds", type=float, default=60, help="of arrivals at each rate")
    parser.add_argument("--least", type=int, default=10, help="requests at each rate, at least")
    parser.add_argument("--seed", type=int, default=0, help="of lengths, prompts and arrivals")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each server")
    parser.add_argument("--model", default=model_files.DEMO, help="demo, or a directory")
    parser.add_argument("--install", action="store_true", help="install servers that are not")
    parser.add_argument(
        "--machine", default=f"{os.cpu_count()} cores", help="how the report describes it"
    )
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the report")
    parser.add_argument(
        "--folder",
        type=Path,
        default=registry.default_folder(),
        help="for environments and logs",
    )
    options = parser.parse_args()
    try:
        options.kinds = choose(list(options.servers), options.server)
        options.model = model_files.choose(options.model)
    except ValueError as error:
        parser.error(str(error))
    if min(options.rates) <= 0 or options.seconds <= 0 or options.least < 1 or options.threads < 1:
        parser.error("--rates, --seconds, --least and --threads must be above 0")
    return options


if __name__ == "__main__":
    main()
