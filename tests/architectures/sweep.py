"""Check that every causal-LM architecture of transformers is served right or refused.

`python -m tests.architectures.sweep [NAME ...]` (or `make architectures`) creates a tiny random
model of each, serves it and compares; see `serve`. It exits with 1 if one is served wrongly or
refused without a clear message, or if fewer than LEAST_RIGHT are right.
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import structlog
import torch
from transformers.utils import logging

from tests.architectures.entries import Entry, entries
from tests.architectures.serve import Finding, Outcome, examine

LEAST_RIGHT = 150
"""Minimum number of right entries and variants; transformers 5.23 had more."""
BAD = {Outcome.WRONG, Outcome.CRASHED, Outcome.FAILED, Outcome.NO_CONFIG}
TIMEOUT_SECONDS = 600.0

_processes = multiprocessing.get_context("forkserver")


def main() -> int:
    """Run the command; return its exit status."""
    options = _arguments()
    chosen = [entry for entry in entries() if not options.names or entry.name in options.names]
    if unknown := set(options.names) - {entry.name for entry in chosen}:
        print(f"there is no entry {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    _processes.set_forkserver_preload(["tests.architectures.serve"])
    began = time.monotonic()
    with ThreadPoolExecutor(options.jobs) as threads:
        findings = []
        for finding in threads.map(examine_apart, chosen):
            findings.append(finding)
            print(row(finding), flush=True)
    counts = Counter(finding.outcome for finding in findings)
    print(f"\n{len(findings)} in {time.monotonic() - began:.0f} s:", end=" ")
    print(", ".join(f"{counts[outcome]} {outcome}" for outcome in Outcome if counts[outcome]))
    for outcome in Outcome:
        if outcome in BAD and counts[outcome]:
            print(f"{outcome}: {', '.join(f.name for f in findings if f.outcome == outcome)}")
    if options.json:
        rows = [finding.as_dict() for finding in findings]
        options.json.write_text(json.dumps({"counts": counts, "entries": rows}, indent=1))
    too_few = not options.names and counts[Outcome.RIGHT] < LEAST_RIGHT
    if too_few:
        print(f"only {counts[Outcome.RIGHT]} are right, of at least {LEAST_RIGHT}")
    return int(too_few or not BAD.isdisjoint(counts))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help="entries to examine; default: all")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="entries at a time")
    parser.add_argument("--json", type=Path, help="file to write the findings to")
    return parser.parse_args()


def examine_apart(entry: Entry) -> Finding:
    """Examine an entry in its own process, which may die or hang."""
    began = time.monotonic()
    receiver, sender = _processes.Pipe(duplex=False)
    process = _processes.Process(target=_examine, args=(entry, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if receiver.poll(TIMEOUT_SECONDS):
            finding = receiver.recv()
        else:
            finding = Finding(entry.name, Outcome.CRASHED, f"no end in {TIMEOUT_SECONDS:.0f} s")
    except EOFError:
        process.join()
        finding = Finding(entry.name, Outcome.CRASHED, f"died: exit code {process.exitcode}")
    process.kill()
    process.join()
    finding.seconds = round(time.monotonic() - began, 1)
    return finding


def _examine(entry: Entry, sender: Connection) -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        sender.send(examine(entry, Path(directory)))


def row(finding: Finding) -> str:
    """Return an entry's line of the table."""
    error = "" if finding.error is None else f"{finding.error:.1e}"
    seconds = f"{finding.seconds:5.1f} s"
    return f"{finding.name:28} {finding.outcome:9} {error:>8} {seconds}  {finding.detail}"


if __name__ == "__main__":
    sys.exit(main())
