"""Results on the terminal: a table for one run, or one row per run."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table

from octavo.cli.bench.metrics import OK, Distribution, RunFigures
from octavo.cli.bench.report import Report, Run
from octavo.cli.bench.settings import Closed, Open, Plan
from octavo.cli.output import number_table

CPU_SHARE_TO_TELL = 0.2
"""CPU share above which the load generator may slow a server on this machine."""

LATENCIES = ("ttft", "tpot", "itl", "e2e", "normalized")
ACRONYMS = {"ttft", "tpot", "itl"}

LAG_TO_TELL = 20.0
"""Milliseconds of p99 sending delay above which a note is printed."""


def describe(plan: Plan) -> str:
    """Return a short description of a plan."""
    match plan:
        case Open(rate=rate, burstiness=burstiness):
            spread = "" if burstiness == 1 else f", burstiness {burstiness:g}"
            return f"{rate:g} requests/s{spread}"
        case Closed(concurrency=None):
            return "all at once"
        case Closed(concurrency=1):
            return "one at a time"
        case Closed(concurrency=limit):
            return f"{limit} at a time"


def line(run: Run) -> str:
    """Return one line with a run's main metrics."""
    figures = run.figures
    ttft = f", TTFT p50 {_ms(figures.ttft.p50)} ms" if figures.ttft else ""
    return (
        f"[dim]{describe(run.plan)}:[/] {figures.output_tokens_per_s:,.1f} output tokens/s, "
        f"{figures.requests_per_s:,.2f} requests/s{ttft}{_errors(figures.errors, ', ')}"
    )


def render(report: Report) -> Iterator[RenderableType]:
    """Yield the printed parts of a report."""
    yield f"[bold]{report.command}[/] of {escape(report.model)}"
    if len(report.runs) == 1:
        yield _rates(report.runs[0])
        yield _latencies(report.runs[0].figures)
    else:
        yield _sweep(report)


def notes(run: Run) -> Iterator[str]:
    """Yield a run's errors and warnings."""
    figures = run.figures
    first = {record.code: record.error for record in reversed(run.records) if record.code != OK}
    for code, count in figures.errors.items():
        yield f"[red]{count} × {code}[/]: {escape(first[code])}"
    per_token = figures.client_cpu_us_per_token
    if figures.client_cpu_share > CPU_SHARE_TO_TELL and per_token is not None:
        yield (
            f"[yellow]{describe(run.plan)}: the load generator used {figures.client_cpu_share:.0%} "
            f"of a core, {per_token:.0f} µs per token; this slows a server on the same machine[/]"
        )
    if isinstance(run.plan, Open) and figures.lag and figures.lag.p99 > LAG_TO_TELL:
        yield (
            f"[yellow]{describe(run.plan)}: requests were sent late, p99 {figures.lag.p99:.0f} ms; "
            "latencies count from the due time[/]"
        )


def _rates(run: Run) -> Table:
    figures = run.figures
    requests = f"{figures.requests} in {figures.seconds:.2f} s, {describe(run.plan)}"
    rows = [
        ("requests", requests, f"{figures.requests_per_s:,.2f}/s"),
        ("input tokens", f"{figures.input_tokens:,}", f"{figures.input_tokens_per_s:,.1f}/s"),
        ("output tokens", f"{figures.output_tokens:,}", f"{figures.output_tokens_per_s:,.1f}/s"),
    ]
    if figures.cached_tokens:
        share = figures.cached_tokens / figures.input_tokens
        rows.insert(2, ("  cached", f"{figures.cached_tokens:,}", f"{share:.0%}"))
    if figures.goodput is not None:
        share = figures.goodput * figures.seconds / figures.requests if figures.requests else 0.0
        rows.append(("goodput", f"{share:.0%} of requests", f"{figures.goodput:,.2f}/s"))
    if figures.tokens_per_message is not None and figures.tokens_per_message > 1.005:
        rows.append(("tokens per message", f"{figures.tokens_per_message:.2f}", ""))
    if figures.unfinished:
        rows.append(("interrupted", f"{figures.unfinished} requests", ""))
    if figures.errors:
        rows.append(("failed", _errors(figures.errors), ""))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    table.add_column(justify="right", style="bold", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _latencies(figures: RunFigures) -> Table:
    table = number_table("milliseconds", "mean", "p50", "p90", "p99")
    for name in LATENCIES:
        times: Distribution | None = getattr(figures, name)
        shown = name.upper() if name in ACRONYMS else name
        if times is not None:
            table.add_row(shown, *map(_ms, (times.mean, times.p50, times.p90, times.p99)))
    return table


def _sweep(report: Report) -> Table:
    runs = report.runs
    variable = "rate" if isinstance(runs[0].plan, Open) else "at once"
    goodput = any(run.figures.goodput is not None for run in runs)
    failed = any(run.figures.errors for run in runs)
    names = ["requests\nper s", *(["goodput\nper s"] if goodput else [])]
    names += [
        "tokens/s\nin",
        "\nout",
        "TTFT ms\np50/p99",
        "TPOT ms\np50/p99",
        "normalized\nmean ms",
        "e2e s\np50/p99",
    ]
    table = number_table(variable, *names, *(["failed"] if failed else []))
    for run in runs:
        figures = run.figures
        cells = [run.label, f"{figures.requests_per_s:,.2f}"]
        if goodput:
            cells.append("" if figures.goodput is None else f"{figures.goodput:,.2f}")
        cells += [f"{figures.input_tokens_per_s:,.0f}", f"{figures.output_tokens_per_s:,.0f}"]
        for times in (figures.ttft, figures.tpot):
            cells.append(f"{_ms(times.p50)}/{_ms(times.p99)}" if times else "")
        cells.append(_ms(figures.normalized.mean) if figures.normalized else "")
        e2e = figures.e2e
        cells.append(f"{e2e.p50 / 1e3:,.1f}/{e2e.p99 / 1e3:,.1f}" if e2e else "")
        table.add_row(*cells, *([str(sum(figures.errors.values()))] if failed else []))
    return table


def _errors(errors: dict[str, int], before: str = "") -> str:
    """Return failures by status; empty if there are none."""
    if not errors:
        return ""
    return before + ", ".join(f"[red]{count} × {code}[/]" for code, count in errors.items())


def _ms(milliseconds: float) -> str:
    """Return milliseconds, with one decimal below 100."""
    return f"{milliseconds:,.1f}" if milliseconds < 100 else f"{milliseconds:,.0f}"
