"""The JSON report of `octavo bench`: settings, metrics and every request."""

from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from octavo.cli.bench.metrics import Record, RunFigures
from octavo.cli.bench.settings import Closed, Objectives, Open, Plan, Target, Workload


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement, at one rate or concurrency."""

    plan: Plan
    figures: RunFigures
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """The rate or concurrency, for a table row."""
        match self.plan:
            case Open(rate=rate):
                return f"{rate:g}/s"
            case Closed(concurrency=None):
                return "all at once"
            case Closed(concurrency=limit):
                return f"{limit}"


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one invocation.

    Attributes:
        format: Name and version of this layout.
        version: Octavo's version on the client.
        command: "throughput", "latency" or "serve".
        date: Start time, ISO 8601 in UTC.
        client: The load generator's machine.
        model: The model's name.
        workload: The requests.
        target: The server.
        objectives: Latency objectives for goodput.
        runs: Runs in order of execution.
        interrupted: Whether ctrl-C ended the runs; the last one is then incomplete.
    """

    version: str
    command: str
    date: str
    client: str
    model: str
    workload: Workload
    target: Target
    objectives: Objectives | None
    runs: tuple[Run, ...]
    interrupted: bool = False
    format: Literal["octavo-bench/1"] = "octavo-bench/1"


_ADAPTER = TypeAdapter(Report)


def to_json(report: Report) -> str:
    """Return the report as JSON."""
    return _ADAPTER.dump_json(report, indent=1).decode()


def from_json(text: str) -> Report:
    """Return the report in the JSON of `to_json`.

    Raises:
        pydantic.ValidationError: The JSON is not a report.
    """
    return _ADAPTER.validate_json(text)
