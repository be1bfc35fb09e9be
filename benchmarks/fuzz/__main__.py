"""Send a router and an engine a hundred thousand bad requests and check what they leave behind.

    python -m benchmarks.fuzz [--requests 100000] [--seed 0] [--only NUMBER]

Real processes serve a tiny model. Each port gets calls with random, nearly valid and broken
messages, cancelled and past their deadline at any moment, and connections that break HTTP/2's rules
or flood it; an ordinary client sends the same request all the while. Case NUMBER of a seed is
always the same.

It fails where an answer is INTERNAL, UNKNOWN or UNAVAILABLE or does not come, where the ordinary
client is not served, and where afterwards a process was replaced, has logged an error, or holds a
block, a request, a session, a task or a file more than before.
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
    """Run all cases; return 0 if there is no fault."""
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
    parser.add_argument("--only", type=int, help="this case alone, by its number")
    parser.add_argument("--workers", type=int, default=64, help="cases at a time")
    parser.add_argument("--output", type=Path, help="a Markdown file for the results")
    sys.exit(asyncio.run(main(parser.parse_args())))
