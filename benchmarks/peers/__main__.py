"""Measure the peers, print the tables, and write them as JSON and as Markdown."""

import argparse
import os
import platform
import re
import shlex
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks.peers import model_files, registry, report, workloads
from benchmarks.peers.model_files import Model
from benchmarks.peers.provenance import RESULTS, commit, machine
from benchmarks.peers.report import Circumstances
from benchmarks.peers.rounds import Fleet, measure
from benchmarks.peers.shapes import SHAPES

QUICK_REQUESTS = 12


def main() -> None:
    """Parse the arguments, measure, and write the results."""
    options = _options()
    console = Console()
    count, rounds = (QUICK_REQUESTS, 1) if options.quick else (options.requests, options.rounds)
    model: Model = options.model
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that workers end
    load, start, date = os.getloadavg()[0], time.monotonic(), datetime.now(UTC)

    def say(text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - start), 60)
        console.print(f"[dim]{minutes:3}:{seconds:02}[/] {text}", highlight=False)

    with Fleet(
        *(model, options.folder, options.threads, count), rebuild=options.rebuild, say=say
    ) as fleet:
        results = measure(fleet, options.peers, rounds, say)
    mixed, single = workloads.mixed(0, count), workloads.single(0)
    where = Circumstances(
        date=f"{date:%Y-%m-%d}",
        machine=machine(),
        system=f"{platform.system()}, Python {platform.python_version()}",
        load=load,
        model=model.title,
        command=shlex.join(["python", "-m", "benchmarks.peers", *sys.argv[1:]]),
        commit=commit(),
        threads=options.threads,
        rounds=rounds,
        seconds=time.monotonic() - start,
        workloads={
            "The mix": f"{mixed.title}, {mixed.prompt_tokens:,} prompt tokens and"
            f" {mixed.output_tokens:,} output tokens in all, greedy, lengths fixed.",
            "One request": f"{single.prompt_tokens} prompt tokens and"
            f" {single.output_tokens} output tokens.",
        },
    )
    ours = [peer.name for peer in options.peers if peer.is_octavo]
    options.output.mkdir(parents=True, exist_ok=True)
    base = options.output / _file_name(model)
    base.with_suffix(".json").write_text(report.as_json(results, where))
    page = report.markdown(results, ours, where)
    base.with_suffix(".md").write_text(page)
    print(page)
    console.print(f"{where.seconds / 60:.0f} minutes; written to {base}.*")
    if not any(result.samples for result in results):
        sys.exit(1)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Octavo and its peers, measured together."
    )
    names = ", ".join(peer.name for peer in registry.PEERS)
    parser.add_argument("--peers", default="", help=f"some of them: {names}")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds (default: 3)")
    parser.add_argument(
        "--model",
        default=model_files.DEMO,
        help=f"{', '.join([model_files.DEMO, *SHAPES])}, or a directory (default: demo)",
    )
    parser.add_argument(
        "--before",
        type=Path,
        metavar="DIRECTORY",
        help="another checkout of this project, with stubs, to measure as well",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=workloads.REQUESTS,
        help=f"of the mix, at most {workloads.REQUESTS} (default: all)",
    )
    parser.add_argument("--quick", action="store_true", help="one round, a quarter of the mix")
    parser.add_argument("--threads", type=int, default=2, help="of each peer (default: 2)")
    parser.add_argument("--rebuild", action="store_true", help="make the environments anew")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument(
        "--folder",
        type=Path,
        default=registry.default_folder(),
        help="for environments, model files and logs",
    )
    options = parser.parse_args()
    try:
        options.model = model_files.choose(options.model)
        options.peers = registry.choose(options.peers, options.model.forms)
        if options.before:
            options.peers = registry.with_before(options.peers, _checkout(options.before))
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads are at least 1")
    if not 1 <= options.requests <= workloads.REQUESTS:
        parser.error(f"--requests is from 1 to {workloads.REQUESTS}")
    return options


def _checkout(directory: Path) -> Path:
    """Return a checkout's absolute path.

    Raises:
        ValueError: The directory is no checkout, or has no stubs.
    """
    if not (directory / "octavo" / "v1").is_dir():
        raise ValueError(f"--before {directory}: no checkout with octavo/v1 (make protos)")
    return directory.resolve()


def _file_name(model: Model) -> str:
    """Return the name of the results' files, without their suffix."""
    if model.name == model_files.DEMO:
        return "peers"
    return "peers_" + re.sub(r"\W", "_", model.name)  # a dot would begin a suffix


if __name__ == "__main__":
    main()
