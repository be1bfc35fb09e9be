"""Counts the prompt tokens that engines need not compute, by how requests are spread over them.

    python -m benchmarks.balancing [--engines 2] [--prefixes 50] [--rounds 6]

Requests begin with one of many system prompts, more than one engine's cache
has room for, and each policy sends the same ones, in the same order, to engines
that have cached nothing yet. The lines give the share of the prompts' tokens
that were found cached, and the requests that each engine had.
"""

import argparse
import asyncio
import random
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fleet import EOS, Node, all_up, engine, make_model, router
from benchmarks.metrics import Metrics
from octavo import AsyncClient
from octavo.common.ports import free_port
from octavo.router.balancing import POLICIES

BLOCK_SIZE = 16
PREFIX_TOKENS = 160
TAIL_TOKENS = 16
OUTPUT_TOKENS = 4
AT_ONCE = 12
CACHE_SHARE = 0.75
"""One engine's blocks, as a share of what all prefixes take."""


@dataclass
class Spread:
    """What a policy made of the requests.

    Attributes:
        prompt_tokens: of all requests.
        cached_tokens: of these, found in caches.
        requests: that each engine had.
    """

    prompt_tokens: int
    cached_tokens: int
    requests: list[int]

    @property
    def imbalance(self) -> float:
        """How far the busiest engine is above the mean, as a share of it."""
        return max(self.requests) * len(self.requests) / sum(self.requests) - 1


def make_prompts(prefixes: int, rounds: int) -> list[list[int]]:
    """Every prefix once a round, in random order, each time with another end."""
    draw = random.Random(0)
    heads = [[draw.randrange(EOS) for _ in range(PREFIX_TOKENS)] for _ in range(prefixes)]
    return [
        head + [draw.randrange(EOS) for _ in range(TAIL_TOKENS)]
        for _ in range(rounds)
        for head in draw.sample(heads, prefixes)
    ]


async def measure(model: str, policy: str, engines: int, prompts: list[list[int]]) -> Spread:
    """Starts engines and a router of the policy, and has them serve the prompts."""
    heads = len({tuple(prompt[:PREFIX_TOKENS]) for prompt in prompts})
    blocks = int(CACHE_SHARE * heads * PREFIX_TOKENS / BLOCK_SIZE)
    async with AsyncExitStack() as stack:

        async def start(node: Node) -> Node:
            stack.push_async_callback(node.close)
            return await node.start()

        ports = [free_port() for _ in range(engines)]
        nodes = [
            await start(engine(model, num_blocks=blocks, max_model_len=256, metrics_port=port))
            for port in ports
        ]
        front = await start(router([node.address for node in nodes], balancing=policy))
        client = await stack.enter_async_context(AsyncClient(front.address))
        await all_up(front, engines)
        places = asyncio.Semaphore(AT_ONCE)

        async def ask(prompt: list[int]) -> int:
            async with places:
                stream = client.generate(prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
                return (await stream.complete()).usage.cached_tokens

        cached = await asyncio.gather(*map(ask, prompts))
        name = "octavo_engine_requests_total"
        requests = [int(Metrics(port).value(name, outcome="finished")) for port in ports]
    return Spread(sum(map(len, prompts)), sum(cached), requests)


async def compare(engines: int, prefixes: int, rounds: int) -> None:
    """Measures every policy and prints what came of it."""
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
    """Parses the arguments and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--prefixes", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=6)
    asyncio.run(compare(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
