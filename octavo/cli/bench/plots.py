"""Plots: latency and throughput over rate or concurrency, or one run's distributions."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from octavo.cli.bench.metrics import OK
from octavo.cli.bench.report import Report, Run
from octavo.cli.bench.settings import Closed, Open

LATENCIES = ("ttft", "tpot", "itl", "e2e")
_COLOURS = {"p50": "#2a9d5c", "p90": "#e08e45", "p99": "#d1495b"}


def save(report: Report, path: Path) -> None:
    """Plot the report to a file; its suffix sets the format.

    Raises:
        OSError: The file cannot be written.
    """
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(f"octavo bench {report.command}, {report.model}")
    if len(report.runs) == 1:
        _spreads(figure, report.runs[0])
    else:
        _sweep(figure, report.runs)
    figure.savefig(path, dpi=100)


def _spreads(figure: Figure, run: Run) -> None:
    """Plot the cumulative distributions of one run's latencies."""
    done = [record for record in run.records if record.code == OK]
    samples: dict[str, npt.ArrayLike] = {
        "ttft": [record.ttft for record in done],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": np.concatenate([record.itl for record in done]) if done else (),
        "e2e": [record.e2e for record in done],
    }
    for axes, (name, seconds) in zip(figure.subplots(2, 2).flat, samples.items(), strict=True):
        times = np.asarray(seconds) * 1e3
        if times.size:
            axes.ecdf(times)
        axes.set(title=_title(name), xlabel="ms", ylabel="share of samples", ylim=(0, 1.02))
        axes.grid(alpha=0.3)


def _sweep(figure: Figure, runs: Sequence[Run]) -> None:
    """Plot rates and latency percentiles over the varied rate or concurrency."""
    label, places = _variable(runs)
    grid = figure.subplots(2, 3)
    _throughput(grid[0, 0], runs, places)
    _requests(grid[1, 0], runs, places)
    for axes, name in zip((grid[0, 1], grid[0, 2], grid[1, 1], grid[1, 2]), LATENCIES, strict=True):
        for percentile, colour in _COLOURS.items():
            distributions = [getattr(run.figures, name) for run in runs]
            times = [np.nan if one is None else getattr(one, percentile) for one in distributions]
            axes.plot(places, times, "o-", color=colour, label=percentile)
        axes.set(title=_title(name), ylabel="ms")
        axes.set_ylim(bottom=0)
    for axes in grid.flat:
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)


def _variable(runs: Sequence[Run]) -> tuple[str, list[float]]:
    """Return the label of the varied quantity and its values."""
    values: list[float] = []
    label = "requests in flight"
    for run in runs:
        match run.plan:
            case Open(rate=rate):
                label = "request rate, requests/s"
                values.append(rate)
            case Closed(concurrency=limit):
                values.append(limit or len(run.records))
    return label, values


def _throughput(axes: Axes, runs: Sequence[Run], places: Sequence[float]) -> None:
    outputs = [run.figures.output_tokens_per_s for run in runs]
    axes.plot(places, outputs, "o-", label="output")
    axes.set(title="Throughput", ylabel="tokens/s")
    axes.set_ylim(bottom=0)


def _requests(axes: Axes, runs: Sequence[Run], places: Sequence[float]) -> None:
    """Plot served requests and goodput."""
    axes.plot(places, [run.figures.requests_per_s for run in runs], "o-", label="served")
    goodput = [run.figures.goodput for run in runs if run.figures.goodput is not None]
    if goodput:  # all runs of a report have goodput, or none
        axes.plot(places, goodput, "s--", label="goodput")
    axes.set(title="Requests", ylabel="requests/s")
    axes.set_ylim(bottom=0)


def _title(name: str) -> str:
    return name if name == "e2e" else name.upper()
