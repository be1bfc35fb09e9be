"""What `--json` writes: everything about a call of `octavo bench`, each request included."""

from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from octavo.cli.bench.metrics import Figures, Record
from octavo.cli.bench.settings import Closed, Objectives, Open, Plan, Target, Workload


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement: one rate, or one concurrency."""

    plan: Plan
    figures: Figures
    records: tuple[Record, ...]

    @property
    def label(self) -> str:
        """What sets it apart from the other runs."""
        match self.plan:
            case Open(rate=rate):
                return f"{rate:g}/s"
            case Closed(concurrency=None):
                return "all at once"
            case Closed(concurrency=limit):
                return f"{limit}"


@dataclass(frozen=True, slots=True)
class Report:
    """A call of the command.

    Attributes:
        format: this layout's name; another one gets another name.
        version: octavo's, on the client's side.
        command: "throughput", "latency" or "serve".
        date: the start, ISO 8601 in UTC.
        client: the machine that the load came from.
        model: the model's name.
        workload: what was sent.
        target: where it was sent.
        objectives: what counts as goodput.
        runs: in the order they were made.
        interrupted: whether ctrl-C ended it; the last run is then a part.
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
    """The report as JSON."""
    return _ADAPTER.dump_json(report, indent=1).decode()


def from_json(text: str) -> Report:
    """Reads what `to_json` wrote.

    Raises:
        pydantic.ValidationError: it is something else.
    """
    return _ADAPTER.validate_json(text)
