"""Compare how many prompt tokens each balancing policy finds cached on the engines.

    python -m benchmarks.balancing [--engines 2] [--prefixes 50] [--rounds 6]

Requests begin with one of many system prompts, more than fit in one engine's cache. Each policy
sends the same requests in the same order to engines with empty caches. Each line has the share of
prompt tokens that were cached, and the number of requests per engine.
"""

import argparse
import asyncio
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fixture import EOS, engine, make_model, router, serving
from octavo.cli.bench.grpc_endpoint import GrpcEndpoint
from octavo.cli.bench.load import Load
from octavo.cli.bench.workload import BenchRequest
from octavo.router.balancing import POLICIES

BLOCK_SIZE = 16
PREFIX_TOKENS = 160
TAIL_TOKENS = 16
OUTPUT_TOKENS = 4
AT_ONCE = 12
CACHE_SHARE = 0.75
"""Ratio of one engine's blocks to the blocks of all prefixes."""


@dataclass
class Spread:
    """Prompt tokens, cached prompt tokens, and the number of requests of each engine."""

    prompt_tokens: int
    cached_tokens: int
    requests: list[int]

    @property
    def imbalance(self) -> float:
        """Requests of the busiest engine relative to the mean, minus 1."""
        return max(self.requests) * len(self.requests) / sum(self.requests) - 1


def make_prompts(prefixes: int, rounds: int) -> list[list[int]]:
    """Return every prefix once per round, in random order, with a new tail each time."""
    draw = random.Random(0)
    heads = [[draw.randrange(EOS) for _ in range(PREFIX_TOKENS)] for _ in range(prefixes)]
    return [
        head + [draw.randrange(EOS) for _ in range(TAIL_TOKENS)]
        for _ in range(rounds)
        for head in draw.sample(heads, prefixes)
    ]


async def measure(model: str, policy: str, engines: int, prompts: list[list[int]]) -> Spread:
    """Serve the prompts with new engines and a router with this policy."""
    heads = len({tuple(prompt[:PREFIX_TOKENS]) for prompt in prompts})
    blocks = int(CACHE_SHARE * heads * PREFIX_TOKENS / BLOCK_SIZE)
    nodes = [engine(model, num_blocks=blocks, max_model_len=256) for _ in range(engines)]
    front = router([node.address for node in nodes], balancing=policy)
    async with serving(nodes, front) as client:
        load = Load(GrpcEndpoint(client), "", salt="")
        asked = [BenchRequest(prompt, OUTPUT_TOKENS, ignore_eos=True) for prompt in prompts]
        await load.send_closed(asked, AT_ONCE)
        cached = sum(record.cached_tokens for record in load.records)
        name = "octavo_engine_requests_total"
        requests = [int(node.metrics().value(name, outcome="finished")) for node in nodes]
    return Spread(sum(map(len, prompts)), cached, requests)


async def compare(engines: int, prefixes: int, rounds: int) -> None:
    """Measure and print every policy."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory))
        prompts = make_prompts(prefixes, rounds)
        for policy in POLICIES:
            spread = await measure(model, policy, engines, prompts)
            print(
                f"{policy:12}: {spread.cached_tokens:7} of {spread.prompt_tokens} prompt tokens "
                f"cached ({spread.cached_tokens / spread.prompt_tokens:.1%}), requests by engine "
                f"{spread.requests}",
                flush=True,
            )


def main() -> None:
    """Parse the arguments and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--prefixes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=6)
    asyncio.run(compare(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
