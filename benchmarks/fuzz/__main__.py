"""Is rude to a router and an engine, a hundred thousand times, and sees what that leaves behind.

    python -m benchmarks.fuzz [--requests 100000] [--seed 0] [--only NUMBER]

Real processes serve a tiny model. At each port come calls with wild, nearly
right and broken messages, cancelled and past their deadline at any moment, and
connections that speak HTTP/2 badly or only too much of it; an ordinary client
asks the same question all the while. Case NUMBER of a seed is always the same.

It fails where an answer is INTERNAL, UNKNOWN, UNAVAILABLE or does not come,
where the ordinary client is not served, and where afterwards a process is not
the one that it was, has logged an error, or holds a block, a request, a
session, a task or a file more than before.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from benchmarks.fuzz import report
from benchmarks.fuzz.run import Outcome, fuzz
from benchmarks.fuzz.stand import stand

MIB = 1 << 20


async def main(options: argparse.Namespace) -> int:
    """Runs it all; returns 0 if nothing was found."""
    with tempfile.TemporaryDirectory() as directory:
        async with stand(Path(directory)) as servers:
            numbers = range(options.requests) if options.only is None else [options.only]
            outcome = Outcome()
            said = asyncio.create_task(_say(outcome, len(numbers)))
            await fuzz(servers, options.seed, numbers, outcome, workers=options.workers)
            said.cancel()
            with suppress(asyncio.CancelledError):
                await said
    text = report.text(outcome, options.seed)
    print(text)
    if options.output is not None:
        options.output.write_text(report.markdown(outcome, options.seed))
    return int(bool(outcome.faults))


async def _say(outcome: Outcome, cases: int) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(10)
        seconds = time.monotonic() - began
        print(f"{seconds:4.0f} s: {outcome.cases} of {cases} cases, {len(outcome.faults)} faults")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000, help="cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="this case alone, by its number")
    parser.add_argument("--workers", type=int, default=64, help="cases at a time")
    parser.add_argument("--output", type=Path, help="a Markdown file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(_options())))
