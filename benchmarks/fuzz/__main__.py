"""Send a hundred thousand bad requests to a router and an engine, and check for damage.

    python -m benchmarks.fuzz [--requests 100000] [--seed 0] [--only NUMBER]

Real processes serve a tiny model. Each port gets calls with random, nearly valid and broken
messages, which are cancelled or exceed their deadline at any moment, and connections that break
HTTP/2's rules or flood it. Meanwhile an ordinary client repeats the same request. Case NUMBER of a
seed is always the same.

It fails if an answer is INTERNAL, UNKNOWN, UNAVAILABLE or missing, or the ordinary client is not
served. It also fails if afterwards a process was replaced, has logged an error, or holds more
blocks, requests, sessions, tasks or files than before.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.fuzz import report
from benchmarks.fuzz.fixture import service
from benchmarks.fuzz.run import Outcome, fuzz


async def main(options: argparse.Namespace) -> int:
    """Run all cases; return 0 if there were no faults."""
    numbers = range(options.requests) if options.only is None else [options.only]
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as directory:
        async with service(Path(directory)) as servers:
            progress = asyncio.create_task(_print_progress(outcome, len(numbers)))
            await fuzz(servers, options.seed, numbers, outcome, workers=options.workers)
            progress.cancel()
            with suppress(asyncio.CancelledError):
                await progress
    text = report.markdown(outcome, options.seed)
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    return int(bool(outcome.faults))


async def _print_progress(outcome: Outcome, cases: int) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(10)
        seconds = time.monotonic() - began
        print(f"{seconds:4.0f} s: {outcome.cases} of {cases} cases, {len(outcome.faults)} faults")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000, help="cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="number of the only case to run")
    parser.add_argument("--workers", type=int, default=64, help="cases at a time")
    parser.add_argument("--output", type=Path, help="Markdown file for the results")
    sys.exit(asyncio.run(main(parser.parse_args())))
