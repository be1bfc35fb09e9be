"""Print a benchmark's results: Markdown tables, percentiles, and whether limits are met."""

from collections.abc import Iterable, Sequence

import numpy as np


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; every column but the first is right-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(map(str, cells))} |" for cells in lines)


def percentiles(seconds: Iterable[float]) -> tuple[float, float, float]:
    """Return the median, the 99th percentile and the maximum in milliseconds; zeros if empty."""
    times = np.array([*seconds] or [0.0]) * 1e3
    median, slow = np.percentile(times, (50, 99))
    return float(median), float(slow), float(times.max())


def verdict(passed: bool, what: str) -> bool:
    """Print whether a limit is met; return `passed`."""
    print(f"{'PASS' if passed else 'FAIL'}: {what}", flush=True)
    return passed
