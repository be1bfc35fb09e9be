"""Runs the study, prints it, and writes memory_study.{json,md,png}."""

import argparse
import importlib.util
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks.memory_study import report
from benchmarks.memory_study.study import Scale, run_study

RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_study", description="KV memory, paged and contiguous."
    )
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests")
    parser.add_argument("--seed", type=int, default=0, help="what traces are drawn with")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()

    console = Console()
    scale = Scale.full(options.seed)
    start = time.monotonic()
    with console.status("Serving the traces"):
        study = run_study(scale.shrunk(0.2) if options.quick else scale)
    seconds = time.monotonic() - start

    report.show(study, console)
    options.output.mkdir(parents=True, exist_ok=True)
    base = options.output / "memory_study"
    date, machine = f"{datetime.now(UTC):%Y-%m-%d}", f"{os.cpu_count()}-core CPU"
    found = {"date": date, "machine": machine, "seconds": round(seconds), **study.as_dict()}
    base.with_suffix(".json").write_text(json.dumps(_rounded(found), indent=2) + "\n")
    made = f"{date}, in {seconds:.0f} s on a {machine}"
    base.with_suffix(".md").write_text(report.markdown(study, made))
    if importlib.util.find_spec("matplotlib"):
        from benchmarks.memory_study import plots  # noqa: PLC0415 - an extra, `bench`

        plots.save(study, base.with_suffix(".png"))
    else:
        console.print("No plots: matplotlib is missing (pip install -e '.[bench]').")
    console.print(f"{seconds:.0f} s; written to {base}.*")


def _rounded(value: object) -> object:
    """The same with numbers as exact as they are meaningful."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value


if __name__ == "__main__":
    main()
