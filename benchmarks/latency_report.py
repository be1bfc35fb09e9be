"""What `latency_curve` found: tables, a plot, and the highest rates within a latency."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.peers.servers import CONTEXT
from benchmarks.report import table
from octavo.cli.bench import openai_endpoint
from octavo.cli.bench.metrics import RunFigures
from octavo.cli.bench.settings import DATA_SETS, Lengths, Shape, Synthetic, Workload
from octavo.cli.bench.workload import BenchRequest, ServedModel, make_requests

SATURATION = 3.0
"""A server is saturated where its median is so many times the reference's at the lowest rate."""
LEVELS = (2.0, SATURATION, 5.0)
LEAST_GAIN = 1.8


@dataclass(frozen=True, slots=True)
class Data:
    """A data set's lengths, and what they are multiplied by."""

    shape: Shape
    scale: float

    @classmethod
    def parse(cls, text: str) -> "Data":
        """Return the data of "sharegpt" or "sharegpt:0.25".

        Raises:
            ValueError: the name or the scale is none.
        """
        name, _, scale = text.partition(":")
        shape, factor = Shape(name), float(scale or 1)
        if shape not in DATA_SETS or not 0 < factor <= 1:
            raise ValueError(text)
        return cls(shape, factor)

    @property
    def title(self) -> str:
        """What it is called in a report."""
        scaled = "" if self.scale == 1 else f", lengths x {self.scale:g}"
        name = {Shape.SHAREGPT: "ShareGPT", Shape.ALPACA: "Alpaca"}[self.shape]
        return f"{name}{scaled}"

    def requests(self, count: int, seed: int) -> list[BenchRequest]:
        """Draw requests; the same count and seed give the same ones."""
        prompt, output = (
            Lengths(each.shape, max(each.mean * self.scale, 1), each.spread * self.scale)
            for each in DATA_SETS[self.shape]
        )
        most = max(round(CONTEXT * self.scale), 2)
        model = ServedModel("", most, openai_endpoint.VOCABULARY)
        return make_requests(
            Workload(Synthetic(prompt, output), count, seed, ignore_eos=True), model
        )


@dataclass(frozen=True, slots=True)
class Point:
    """One server at one rate.

    Attributes:
        rate: requests per second that were sent.
        figures: what came of them; its `normalized` is in milliseconds per token.
    """

    rate: float
    figures: RunFigures

    @property
    def median(self) -> float:
        """Median normalized latency in milliseconds; infinite if a request failed."""
        if self.figures.errors or self.figures.normalized is None:
            return float("inf")
        return self.figures.normalized.p50


@dataclass(frozen=True, slots=True)
class Held:
    """The highest rate that a server holds.

    Attributes:
        rate: requests per second; 0: not even the lowest one that was measured.
        at_least: whether it held every rate that was measured.
    """

    rate: float
    at_least: bool = False

    def __str__(self) -> str:
        """The rate as a table shows it."""
        return f"{'at least ' * self.at_least}{self.rate:.2f}" if self.rate else "none measured"


def held(points: Sequence[Point], limit: float) -> Held:
    """Return the highest rate up to which the median is within the limit.

    Args:
        points: of one server, by rising rate.
        limit: milliseconds per token.
    """
    if not points or points[0].median > limit:
        return Held(0.0)
    for low, high in pairwise(points):
        if high.median > limit:
            share = (limit - low.median) / (high.median - low.median)  # 0 beside an infinity
            return Held(low.rate + share * (high.rate - low.rate))
    return Held(points[-1].rate, at_least=True)


@dataclass
class Curve:
    """What was measured with one data set.

    Attributes:
        data: its lengths.
        points: of each server that ran, by its name and then by rising rate.
    """

    data: Data
    points: dict[str, list[Point]] = field(default_factory=dict)

    def limit(self, level: float, reference: str) -> float | None:
        """Return `level` times the reference's median at the lowest rate, if it was measured."""
        points = self.points.get(reference)
        return level * points[0].median if points else None


def markdown(
    curves: Sequence[Curve],
    titles: Mapping[str, str],
    reference: str,
    *,
    skipped: Mapping[str, str],
    facts: Sequence[str],
    plot: str,
) -> str:
    """Return the report.

    Args:
        curves: what was measured.
        titles: of the servers, by name.
        reference: the server whose latency sets the limits.
        skipped: by title, why a server was not measured.
        facts: lines on how it was measured.
        plot: the plot's file name.
    """
    parts = ["# Latency by request rate", *facts, f"![Normalized latency by rate]({plot})"]
    for curve in curves:
        parts += [f"## {curve.data.title}", _latencies(curve, titles)]
        if curve.points.get(reference):
            parts += [_held_rates(curve, titles, reference)]
    if skipped:
        lines = [f"- {title}: {why}" for title, why in skipped.items()]
        parts += ["## Not measured", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _latencies(curve: Curve, titles: Mapping[str, str]) -> str:
    """Return the table of all points."""
    rows = [
        (f"{point.rate:g}", titles[name], *_cells(point.figures))
        for name, points in curve.points.items()
        for point in points
    ]
    rows.sort(key=lambda row: float(row[0]))
    header = ("Requests/s", "Server", "Requests", "Median ms/token", "p90", "Mean")
    more = ("TTFT p50 ms", "Output tokens/s", "Failed", "Load generator")
    return table((*header, *more), rows)


def _cells(figures: RunFigures) -> tuple[str, ...]:
    """Return a point's cells after its rate and server."""
    normalized = figures.normalized
    latencies = ("-", "-", "-")
    if normalized is not None:
        latencies = tuple(
            f"{value:.1f}" for value in (normalized.p50, normalized.p90, normalized.mean)
        )
    return (
        str(figures.requests + sum(figures.errors.values())),
        *latencies,
        f"{figures.ttft.p50:.0f}" if figures.ttft else "-",
        f"{figures.output_tokens_per_s:.0f}",
        ", ".join(f"{count} x {code}" for code, count in figures.errors.items()) or "0",
        f"{figures.client_cpu_share:.0%} of a core",
    )


def _held_rates(curve: Curve, titles: Mapping[str, str], reference: str) -> str:
    """Return the table of the rates that each server holds at each limit."""
    rows = []
    for level in LEVELS:
        limit = curve.limit(level, reference)
        assert limit is not None
        base = held(curve.points[reference], limit)
        cells = []
        for name, points in curve.points.items():
            found = held(points, limit)
            gain = f" ({_gain(found, base)})" if name != reference and base.rate else ""
            cells.append(f"{found}{gain}")
        rows.append((f"{limit:.0f} ms ({level:g}x)", *cells))
    names = [titles[name] for name in curve.points]
    return table((f"Median at most (x {titles[reference]} at the lowest rate)", *names), rows)


def _gain(found: Held, base: Held) -> str:
    """Return how many times the reference's rate another rate is."""
    at_least, at_most = found.at_least, base.at_least
    bound = "about " if at_least and at_most else "at least " * at_least + "at most " * at_most
    return f"{bound}{found.rate / base.rate:.2f}x"


def draw(curves: Sequence[Curve], titles: Mapping[str, str], reference: str, path: Path) -> None:
    """Plot the medians, and the 90th percentiles dashed; the file's suffix sets the format."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra

    figure = Figure(figsize=(5.5 * len(curves), 4.5), layout="constrained")
    for axes, curve in zip(figure.subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
        for number, (name, points) in enumerate(curve.points.items()):
            told = [point for point in points if point.figures.normalized]
            rates = [point.rate for point in told]
            colour = f"C{number}"
            medians = [point.figures.normalized.p50 for point in told if point.figures.normalized]
            slow = [point.figures.normalized.p90 for point in told if point.figures.normalized]
            axes.plot(rates, medians, "o-", color=colour, label=titles[name])
            axes.plot(rates, slow, "--", color=colour, alpha=0.5)
        limit = curve.limit(SATURATION, reference)
        if limit is not None:
            axes.axhline(limit, color="grey", linewidth=0.8, linestyle=":")
        axes.set(title=curve.data.title, xlabel="requests/s", ylabel="normalized latency, ms/token")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path)


def verdicts(curves: Sequence[Curve], titles: Mapping[str, str], reference: str) -> list[str]:
    """Return, for each data set, what Octavo's best server gains where the reference saturates."""
    lines = []
    for curve in curves:
        limit = curve.limit(SATURATION, reference)
        if limit is None:
            lines.append(f"{curve.data.title}: {reference} was not measured; no verdict")
            continue
        base = held(curve.points[reference], limit)
        for name, points in curve.points.items():
            if not name.startswith("octavo"):
                continue
            found = held(points, limit)
            if base.at_least or not base.rate:
                lines.append(f"{curve.data.title}: the rates do not reach {reference}'s saturation")
                break
            passed = "PASS" if found.rate >= LEAST_GAIN * base.rate else "FAIL"
            if passed == "FAIL" and found.at_least:
                passed = "OPEN"  # it would have held more than was sent
            lines.append(
                f"{passed}: {curve.data.title}, {titles[name]}: {_gain(found, base)} the rate of"
                f" {titles[reference]} at {limit:.0f} ms/token; the mark is {LEAST_GAIN:g}x"
            )
    return lines
