"""Time the first token of a long prompt, first new to a server and then with its prefix cached.

    python -m benchmarks.prefix_caching [--model demo] [--prefix 1000] [--rounds 5] [-- FLAG ...]

Starts `octavo serve`. Each round sends three prompts with the same prefix of random tokens and
different tails of 16 tokens, and asks for one token after each. A model that keeps states keeps
one at the end of the prefix when it sees the prefix for the second time. The time is the client's,
from sending the request to its first token. The last lines give the medians, and the ratio of the
first and the third. `--model` also takes the name of a model with random weights, of
`benchmarks.peers.shapes`: falcon-h1 and granite-4-h keep states.
"""

import argparse
import asyncio
import random
import tempfile
from pathlib import Path
from statistics import median

from benchmarks.peers import shapes
from octavo import AsyncClient
from octavo.cli.bench.load import Load
from octavo.cli.bench.workload import Request
from octavo.cli.local_server import local_server

TAIL = 16
VOCABULARY = range(256, 40_000)
"""The first tokens of a vocabulary are often special ones."""


async def measure(address: str, prefix_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds to the first token of each round, by what became of the prefix before."""
    draw = random.Random(0)
    times: dict[str, list[float]] = {"new": [], "seen once": [], "cached": []}
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
    parser.add_argument("--model", default="demo", help="as `octavo serve` takes it, or a shape")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that both prompts share")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="further flags of `octavo serve`, after --")
    options = parser.parse_args()
    model = options.model
    if model in shapes.SHAPES:
        model = str(shapes.provide(model, Path(tempfile.gettempdir()) / "octavo-prefix-caching"))
    with local_server(model, *options.flags) as address:
        times = asyncio.run(measure(address, options.prefix, options.rounds))
    print(f"\ntime to the first token, median of {options.rounds} rounds:")
    for name, seconds in times.items():
        print(f"  prefix of {options.prefix} tokens {name}: {median(seconds) * 1e3:8.1f} ms")
    print(f"  ratio: {median(times['new']) / median(times['cached']):.1f}x")


if __name__ == "__main__":
    main()
