"""Write the results of a fuzzer run as Markdown."""

from collections import Counter, defaultdict

from benchmarks.fuzz.run import Outcome
from benchmarks.report import percentiles, table

MIB = 1 << 20


def markdown(outcome: Outcome, seed: int) -> str:
    """Return the whole report, the faults last."""
    attacks = ", ".join(f"{name} {count}" for name, count in sorted(outcome.attacks.items()))
    parts = [
        "# Rude clients",
        _summary(outcome, seed),
        "What calls were answered:",
        _answers(outcome),
        f"Connections that spoke HTTP/2 badly: {attacks}.",
        "What the processes held before and after:",
        _levels(outcome),
        "\n\n".join(outcome.faults) or "No faults.",
    ]
    return "\n\n".join(parts) + "\n"


def _summary(outcome: Outcome, seed: int) -> str:
    calls, attacks = outcome.answers.total(), outcome.attacks.total()
    median, slow, _ = percentiles(outcome.ordinary)
    return (
        f"Seed {seed}: {outcome.cases:,} cases in {outcome.seconds:.0f} s, {calls:,} calls and "
        f"{attacks:,} connections; {len(outcome.faults)} faults. An ordinary request beside them "
        f"took {median / 1e3:.2f} s (p99 {slow / 1e3:.2f} s, {len(outcome.ordinary)} of them)."
    )


def _answers(outcome: Outcome) -> str:
    methods: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (method, code), count in outcome.answers.items():
        methods[method.rpartition("/")[2]][code] += count
    codes = sorted({code for _, code in outcome.answers})
    rows = [
        [name, *(f"{counts[code]:,}" for code in codes)] for name, counts in sorted(methods.items())
    ]
    return table(["method", *codes], rows)


def _levels(outcome: Outcome) -> str:
    rows = []
    for moment, all_levels in (("before", outcome.before), ("after", outcome.after)):
        for name, held in all_levels.items():
            counts = (held.fds, held.tasks, held.sessions, held.requests, held.blocks)
            rows.append([f"{name} {moment}", f"{held.rss / MIB:.0f}", *counts])
    return table(["", "RSS, MiB", "files", "tasks", "sessions", "requests", "blocks"], rows)
