"""What load and context cost: throughput by concurrency, time per token by context length.

    python -m benchmarks.load_cost [--model demo] [--quantization none]

A server is started, and asked over gRPC. First so many streams at a time, each
followed by the next as it ends: output tokens a second must not fall as more are
added. Then one stream at a time, after prompts of more and more tokens: what a token
takes beyond what it takes at the shortest must grow as the bytes of K and V do that
are read for it, and not faster. Results go to `benchmarks/results/load_cost.md`.
"""

import argparse
import asyncio
import os
import platform
import random
import statistics
import time
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

from octavo import AsyncClient
from octavo.cli.local_server import local_server

RESULTS = Path(__file__).parent / "results" / "load_cost.md"
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8128)
PROMPT, OUTPUT = 64, 64
FEWEST = 8
"""Requests at the least, where few are in flight at a time."""
MEASURED = 48
"""Tokens of a context's stream, of which the median gap counts."""
REPEATS = 3
LEAST_SHARE = 0.95
"""Of the peak, that throughput must keep past it."""
VOCABULARY = range(256, 40_000)


def main() -> None:
    """Parses the arguments, measures and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    arguments = parser.parse_args()
    flags = ("--quantization", arguments.quantization, "--compile", "wait")
    with local_server(arguments.model, *flags, "--no-enable-prefix-caching") as address:
        rates, gaps = asyncio.run(_measure(address))
    tables = [_rates_table(rates), _gaps_table(gaps)]
    for table in tables:
        Console().print(table)
    with RESULTS.open("w") as file:
        cores = os.cpu_count()
        file.write(
            f"# Cost of load and context\n\n`python -m benchmarks.load_cost --quantization "
            f"{arguments.quantization}`, {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, "
            f"{cores} cores. {PROMPT} prompt and {OUTPUT} output tokens a request.\n\n```\n"
        )
        console = Console(file=file, width=100)
        for table in tables:
            console.print(table)
        file.write("```\n")


async def _measure(address: str) -> tuple[dict[int, float], dict[int, float]]:
    """Output tokens a second by concurrency; seconds per token by context length."""
    async with AsyncClient(address) as client:
        await _rate(client, 4)
        rates = {count: await _rate(client, count) for count in CONCURRENCIES}
        gaps = {}
        for length in CONTEXTS:
            gaps[length] = min([await _gap(client, length) for _ in range(REPEATS)])
    return rates, gaps


async def _rate(client: AsyncClient, concurrency: int) -> float:
    left = iter(range(max(FEWEST, 2 * concurrency)))
    tokens = 0

    async def ask() -> None:
        nonlocal tokens
        for _ in left:
            stream = client.generate(
                _prompt(PROMPT), max_tokens=OUTPUT, temperature=0, ignore_eos=True
            )
            (output,) = (await stream.complete()).outputs
            tokens += output.usage.output_tokens  # not in one line with the wait: `+=` reads first

    began = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(concurrency)))
    return tokens / (time.perf_counter() - began)


async def _gap(client: AsyncClient, context: int) -> float:
    stream = client.generate(_prompt(context), max_tokens=MEASURED, temperature=0, ignore_eos=True)
    times = [time.perf_counter() async for _ in stream]
    return statistics.median(b - a for a, b in pairwise(times))


def _prompt(length: int) -> list[int]:
    return random.choices(VOCABULARY, k=length)


def _rates_table(rates: dict[int, float]) -> Table:
    peak = max(rates.values())
    table = Table(title="Output tokens a second, by requests in flight")
    for name in ("in flight", "tokens/s", "of the peak", ""):
        table.add_column(name, justify="right")
    past = False
    for count, rate in rates.items():
        verdict = ("PASS" if rate >= LEAST_SHARE * peak else "FAIL") if past else ""
        table.add_row(str(count), f"{rate:.1f}", f"{rate / peak:.0%}", verdict)
        past = past or rate == peak
    return table


def _gaps_table(gaps: dict[int, float]) -> Table:
    """Growth is a token's extra time over its extra context, in the first column's unit."""
    table = Table(title="Milliseconds a token, by context")
    for name in ("context", "ms", "over the shortest", "us per 1,000 tokens of context"):
        table.add_column(name, justify="right")
    (shortest, least), *_ = gaps.items()
    for context, gap in gaps.items():
        extra = gap - least
        slope = f"{extra / (context - shortest) * 1e9:.0f}" if context > shortest else ""
        table.add_row(f"{context:,}", f"{gap * 1e3:.2f}", f"{extra * 1e3:.2f}", slope)
    return table


if __name__ == "__main__":
    main()
