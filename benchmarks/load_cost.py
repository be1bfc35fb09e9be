"""Measure what load and context cost: throughput by concurrency, time per token by context.

    python -m benchmarks.load_cost [--model demo] [--quantization none] [--output FILE]

Starts a server and sends requests over gRPC. First by concurrency: output tokens a second must not
fall as it grows. Then one stream at a time after longer and longer prompts: a token's extra time
over the shortest context must grow with the bytes of K and V that are read for it, and not faster.
"""

import argparse
import asyncio
import random
from pathlib import Path
from statistics import median

from benchmarks.report import table
from octavo import AsyncClient
from octavo.cli.bench.grpc_endpoint import GrpcEndpoint
from octavo.cli.bench.load import Load
from octavo.cli.bench.metrics import Record
from octavo.cli.bench.workload import BenchRequest
from octavo.cli.local_server import local_server

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8128)
PROMPT, OUTPUT = 64, 64
FEWEST = 8
"""Fewest requests at a concurrency."""
MEASURED = 48
"""Output tokens after a context; the median gap between them counts."""
REPEATS = 3
LEAST_SHARE = 0.95
"""Of the peak, that throughput must keep past it."""
VOCABULARY = range(256, 40_000)


async def measure(address: str) -> tuple[dict[int, float], dict[int, float]]:
    """Return output tokens a second by concurrency, and seconds a token by context."""
    async with AsyncClient(address) as client:

        async def send(count: int, prompt: int, output: int, at_once: int) -> list[Record]:
            prompts = (random.choices(VOCABULARY, k=prompt) for _ in range(count))
            load = Load(GrpcEndpoint(client), "", salt="")
            await load.send_closed(
                [BenchRequest(p, output, ignore_eos=True) for p in prompts], at_once
            )
            return load.records

        async def rate(at_once: int) -> float:
            records = await send(max(FEWEST, 2 * at_once), PROMPT, OUTPUT, at_once)
            seconds = max(record.ended for record in records)
            return sum(record.output_tokens for record in records) / seconds

        await rate(4)
        rates = {at_once: await rate(at_once) for at_once in CONCURRENCIES}
        gaps = {}
        for context in CONTEXTS:
            records = await send(REPEATS, context, MEASURED, 1)
            gaps[context] = min(median(record.itl) for record in records)
    return rates, gaps


def rates_table(rates: dict[int, float]) -> str:
    """Return the table of throughput; past the peak it says whether the mark is met."""
    peak = max(rates.values())
    rows, past = [], False
    for count, rate in rates.items():
        verdict = ("PASS" if rate >= LEAST_SHARE * peak else "FAIL") if past else ""
        rows.append((count, f"{rate:.1f}", f"{rate / peak:.0%}", verdict))
        past = past or rate == peak
    return table(("in flight", "tokens/s", "of the peak", ""), rows)


def gaps_table(gaps: dict[int, float]) -> str:
    """Return the table of milliseconds a token, and its growth with the context."""
    (shortest, least), *_ = gaps.items()
    rows = []
    for context, gap in gaps.items():
        extra = gap - least
        slope = f"{extra / (context - shortest) * 1e9:.0f}" if context > shortest else ""
        rows.append((f"{context:,}", f"{gap * 1e3:.2f}", f"{extra * 1e3:.2f}", slope))
    return table(("context", "ms", "over the shortest", "us per 1,000 tokens of context"), rows)


def main() -> None:
    """Parse the arguments, measure, and print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--quantization", default="none", choices=("none", "int8", "int4"))
    parser.add_argument("--output", type=Path, help="a Markdown file for the tables")
    options = parser.parse_args()
    flags = ("--quantization", options.quantization)
    with local_server(options.model, *flags, "--no-enable-prefix-caching") as address:
        rates, gaps = asyncio.run(measure(address))
    tables = f"{rates_table(rates)}\n\n{gaps_table(gaps)}"
    print(tables)
    if options.output:
        options.output.write_text(f"# Cost of load and context\n\n{tables}\n")


if __name__ == "__main__":
    main()
