"""Write the results as Markdown and as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from benchmarks.peers.results import Rate, Result, agreement, first_token_seconds, ratios
from benchmarks.report import table

MISSING = "-"


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The conditions of a measurement.

    Attributes:
        date: Date of the start in UTC.
        machine: Processor, cores and memory.
        system: Operating system and Python.
        load: Load average in the minute before the start.
        command: Command that started it.
        commit: Commit of this project.
        threads: Threads of each peer.
        rounds: Number of rounds.
        seconds: Total duration.
        workloads: Descriptions of the workloads by name.
        model: The model's title.
    """

    date: str
    machine: str
    system: str
    load: float
    command: str
    commit: str
    threads: int
    rounds: int
    seconds: float
    workloads: dict[str, str]
    model: str


def markdown(results: Sequence[Result], ours: Sequence[str], where: Circumstances) -> str:
    """Return the page; `ours` names the baseline results."""
    lines = [
        "# Octavo and its peers",
        "",
        (
            f"Made by `{where.command}`, {where.date}, in {where.seconds / 60:.0f} minutes on"
            f" {where.machine}; {where.system}; Octavo at {where.commit}. Load average before the"
            f" start: {where.load:.1f}. Every peer computed with {where.threads} threads, and the"
            " others were stopped meanwhile."
        ),
        "",
        f"- The model: {where.model}.",
        *(f"- {name}: {text}" for name, text in where.workloads.items()),
        "",
        (
            "Rates are output tokens a second, medians over the rounds with the lowest and the"
            " highest. Octavo answers over gRPC, through its router: a single request token by"
            " token, the mix in whole answers, as the others give them. These are called in their"
            " own process, as their packages offer it. Each keeps its own defaults for what it"
            " computes in."
        ),
    ]
    for title, header, rows in tables(results, ours):
        lines += ["", f"## {title}", "", table(header, rows)]
    failed = [result for result in results if result.failure]
    if failed:
        lines += ["", "## Not measured, or not to the end", ""]
        lines += [f"- {result.title}: {result.failure}" for result in failed]
    lines += ["", "## Versions", ""]
    lines += [f"- {result.title}: {_versions(result)}" for result in results if result.versions]
    return "\n".join(lines) + "\n"


def as_json(results: Sequence[Result], where: Circumstances) -> str:
    """Return everything, samples included."""
    values = {**asdict(where), "peers": [asdict(result) for result in results]}
    return json.dumps(values, indent=2, default=str) + "\n"


def tables(
    results: Sequence[Result], ours: Sequence[str]
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the title, header and rows of each table."""
    base = [result for result in results if result.name in ours and result.samples]
    made = [("Rates", _rates_header(), _rates(results))]
    for workload, title in (("mixed", "the mix"), ("single", "one request")):
        by_peer = ratios(results, base, workload)
        rows = [
            [result.title, *(_times(by_peer[result.name].get(mine.name)) for mine in base)]
            for result in results
            if result.name in by_peer and result.name not in ours
        ]
        if rows:
            made.append((f"Octavo / peer, {title}", ["Peer", *(mine.title for mine in base)], rows))
    return made


def _rates_header() -> list[str]:
    return ["Peer", "The mix", "One request", "Its first token", "Load", "Agrees", "How"]


def _rates(results: Sequence[Result]) -> list[list[str]]:
    agreed = agreement(results, "mixed")
    rows = []
    for result in results:
        mixed, single = result.of("mixed"), result.of("single")
        first = first_token_seconds(single)
        share = agreed.get(result.name)
        rows.append(
            [
                result.title,
                _rate(Rate.of(mixed)),
                _rate(Rate.of(single)),
                MISSING if first is None else f"{first * 1e3:.0f} ms",
                f"{result.load_seconds[0]:.1f} s" if result.load_seconds else MISSING,
                MISSING if share is None else f"{share:.0%}",
                mixed[-1].note if mixed else MISSING,
            ]
        )
    return rows


def _rate(rate: Rate | None) -> str:
    if rate is None:
        return MISSING
    return f"{rate.median:.1f} ({rate.lowest:.1f}-{rate.highest:.1f})"


def _times(ratio: float | None) -> str:
    return MISSING if ratio is None else f"{ratio:.2f}x"


def _versions(result: Result) -> str:
    return ", ".join(f"{package} {version}" for package, version in result.versions.items())
