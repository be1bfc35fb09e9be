"""What a run of the fuzzer found, for people."""

from collections import Counter, defaultdict
from statistics import median, quantiles

from benchmarks.fuzz.run import Outcome

MIB = 1 << 20


def text(outcome: Outcome, seed: int) -> str:
    """The outcome for a terminal: the faults last."""
    parts = [_summary(outcome, seed), _table(_answers(outcome)), _table(_levels(outcome))]
    parts += outcome.faults or ["No faults."]
    return "\n\n".join(parts)


def markdown(outcome: Outcome, seed: int) -> str:
    """The outcome as a file of results."""
    attacks = ", ".join(f"{name} {count}" for name, count in sorted(outcome.attacks.items()))
    parts = [
        "# Rude clients",
        _summary(outcome, seed),
        "What calls were answered:",
        _table(_answers(outcome)),
        f"Connections that spoke HTTP/2 badly: {attacks}.",
        "What the processes held before and after:",
        _table(_levels(outcome)),
        "\n\n".join(outcome.faults) or "No faults.",
    ]
    return "\n\n".join(parts) + "\n"


def _summary(outcome: Outcome, seed: int) -> str:
    calls, attacks = outcome.answers.total(), outcome.attacks.total()
    lines = (
        f"Seed {seed}: {outcome.cases:,} cases in {outcome.seconds:.0f} s, {calls:,} calls and "
        f"{attacks:,} connections; {len(outcome.faults)} faults."
    )
    if len(outcome.ordinary) > 1:
        worst = quantiles(outcome.ordinary, n=100)[98]
        lines += (
            f" An ordinary request beside them took {median(outcome.ordinary):.2f} s"
            f" (p99 {worst:.2f} s, {len(outcome.ordinary)} of them)."
        )
    return lines


def _answers(outcome: Outcome) -> list[list[str]]:
    methods: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (method, code), count in outcome.answers.items():
        methods[method.rpartition("/")[2]][code] += count
    codes = sorted({code for _, code in outcome.answers})
    rows = [["method", *codes]]
    rows += [
        [name, *(f"{counts[code]:,}" for code in codes)] for name, counts in sorted(methods.items())
    ]
    return rows


def _levels(outcome: Outcome) -> list[list[str]]:
    rows = [["", "RSS, MiB", "files", "tasks", "sessions", "requests", "blocks"]]
    for moment, all_levels in (("before", outcome.before), ("after", outcome.after)):
        for name, held in all_levels.items():
            counts = (held.fds, held.tasks, held.sessions, held.requests, held.blocks)
            rows.append([f"{name} {moment}", f"{held.rss / MIB:.0f}", *map(str, counts)])
    return rows


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    lines.insert(1, "|" + " --- |" * len(rows[0]))
    return "\n".join(lines)
