"""Test and time the kernels on the GPU at hand, in less than 13 minutes.

    python -m benchmarks.gpu [--device cuda] [--parts tests decode ...] [--out DIR]

It needs neither network nor weights, and runs from a copy of the tree that is not installed. Every
part has a time limit and, on a GPU, its own process: a failure is recorded, and the other parts
still run. It prints a table as each part ends, and writes DEVICE.json and DEVICE.png, a roofline
plot, to --out. `--device cpu --tiny` tests the benchmark itself. `--tune`
instead searches some minutes for better tile sizes and writes them to kernels/triton/tuned.json.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu.kernel_tests import ROOT, run_tests
from benchmarks.gpu.parts import PARTS, TEST_SECONDS
from benchmarks.gpu.report import (
    device_name,
    file_stem,
    plot,
    show_key,
    show_part,
    show_tests,
)
from benchmarks.gpu.timing import Timer

RUNS = 20
TINY_RUNS = 2
WIDTH = 150
"""Width of output outside a terminal."""


def _run_part(name: str, device: torch.device, *, tiny: bool) -> dict[str, Any]:
    """Run a part in this process; a failure ends the part and loses its earlier results."""
    began = time.perf_counter()
    rows, failure = [], None
    try:
        timer = Timer(device, runs=TINY_RUNS if tiny else RUNS)
        rows = [asdict(row) for row in PARTS[name].work(timer, tiny)]
    except Exception:  # noqa: BLE001 - whatever fails, the other parts run
        failure = traceback.format_exc()
    return {"rows": rows, "failure": failure, "seconds": time.perf_counter() - began}


def _run_part_apart(name: str) -> dict[str, Any]:
    """Run a part in another process, because an error of the GPU ends its process."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cuda", "--part", name]
    failed: dict[str, Any] = {"rows": [], "seconds": None}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PARTS[name].seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return failed | {"failure": f"stopped after {PARTS[name].seconds} s"}
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return failed | {"failure": done.stderr[-4000:] or f"exit status {done.returncode}"}
    outcome: dict[str, Any] = json.loads(lines[-1])
    return outcome


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return 1 if a test or a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="small sizes that do not measure speed")
    parser.add_argument("--parts", nargs="+", choices=["tests", *PARTS], help="Default: all.")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--tune", action="store_true", help="search for better tiles")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; --device cpu --tiny tests the benchmark itself")
    device = torch.device(args.device)
    if args.part:
        print(json.dumps(_run_part(args.part, device, tiny=args.tiny)))
        return 0
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if args.tune:
        from benchmarks.gpu.tuning import tune  # noqa: PLC0415 - needs Triton

        tune(device, console)
        return 0
    wanted = args.parts or ["tests", *PARTS]
    report: dict[str, Any] = {
        "device": device_name(device),
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tiny": args.tiny,
        "tests": None,
        "parts": {},
    }
    if "tests" in wanted and device.type == "cuda":
        console.print(f"tests (at most {TEST_SECONDS} s) ...")
        report["tests"] = run_tests(TEST_SECONDS)
        show_tests(report, console)
    for name in PARTS:
        if name in wanted:
            console.print(f"{name} (at most {PARTS[name].seconds} s) ...")
            alone = device.type == "cuda"
            outcome = _run_part_apart(name) if alone else _run_part(name, device, tiny=args.tiny)
            report["parts"][name] = outcome
            show_part(report, name, console)
    show_key(console)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / (file_stem(report["device"]) + ".json")
    path.write_text(json.dumps(report, indent=1) + "\n")
    try:
        plot(report, path.with_suffix(".png"))
    except ImportError:
        console.print("no plot: matplotlib is not installed")
    console.print(f"written: {path}")
    failed = any(
        tests["failed"] or tests["stopped"] or not tests["passed"]
        for tests in (report["tests"] or {}).values()
    )
    return int(failed or any(outcome["failure"] for outcome in report["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
