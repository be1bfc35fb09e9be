"""Time the first token of a long prompt, first new to a server and then with its prefix cached.

    python -m benchmarks.prefix_caching [--model demo] [--prefix 1000] [--rounds 5]

Starts `octavo serve`. Each round sends two prompts with the same prefix of random tokens and
different tails of 16 tokens, and asks for one token after each. The time is the client's, from
sending the request to its first token. The last lines give the medians and their ratio.
"""

import argparse
import asyncio
import random
from statistics import median

from octavo import AsyncClient
from octavo.cli.bench.load import Load
from octavo.cli.bench.workload import Request
from octavo.cli.local_server import local_server

TAIL = 16
VOCABULARY = range(256, 40_000)
"""The first tokens of a vocabulary are often special ones."""


async def measure(address: str, prefix_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds to the first token of each round, with the prefix new and cached."""
    draw = random.Random(0)
    times: dict[str, list[float]] = {"new": [], "cached": []}
    async with AsyncClient(address) as client:

        async def ask(prompt: list[int]) -> float:
            load = Load(client, "", salt="")
            await load.send_closed([Request(prompt, 1, ignore_eos=True)], 1)
            (record,) = load.records
            print(f"{record.ttft * 1e3:8.1f} ms, {record.cached_tokens:4} tokens cached")
            return record.ttft

        await ask(draw.choices(VOCABULARY, k=prefix_tokens + TAIL))  # warms the server up
        for _ in range(rounds):
            prefix = draw.choices(VOCABULARY, k=prefix_tokens)
            for found in times.values():
                found.append(await ask(prefix + draw.choices(VOCABULARY, k=TAIL)))
    return times


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that both prompts share")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with local_server(options.model) as address:
        times = asyncio.run(measure(address, options.prefix, options.rounds))
    print(f"\ntime to the first token, median of {options.rounds} rounds:")
    for name, seconds in times.items():
        print(f"  prefix of {options.prefix} tokens {name}: {median(seconds) * 1e3:8.1f} ms")
    print(f"  ratio: {median(times['new']) / median(times['cached']):.1f}x")


if __name__ == "__main__":
    main()
