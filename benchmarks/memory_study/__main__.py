"""Run the study, print it, and write memory_study.{json,md}."""

import argparse
import json
import os
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.memory_study import report
from benchmarks.memory_study.study import Scale, run_study

RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Parse the arguments, run and write the study."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory_study", description="KV memory, paged and contiguous."
    )
    parser.add_argument("--seed", type=int, default=0, help="what traces are drawn with")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args()

    start = time.monotonic()
    study = run_study(Scale.full(options.seed))
    seconds = time.monotonic() - start
    date, machine = f"{datetime.now(UTC):%Y-%m-%d}", f"{os.cpu_count()}-core CPU"
    page = report.markdown(study, f"{date}, in {seconds:.0f} s on a {machine}")
    print(page)
    found = {"date": date, "machine": machine, "seconds": round(seconds), **asdict(study)}
    options.output.mkdir(parents=True, exist_ok=True)
    base = options.output / "memory_study"
    base.with_suffix(".json").write_text(json.dumps(_rounded(found), indent=2) + "\n")
    base.with_suffix(".md").write_text(page)


def _rounded(value: object) -> object:
    """Return the value with 4 significant digits in every number."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value


if __name__ == "__main__":
    main()
