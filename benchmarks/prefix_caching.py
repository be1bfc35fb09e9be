"""Time the first token of a long prompt, without and with its prefix cached.

    python -m benchmarks.prefix_caching [--model demo] [--prefix 1000] [--rounds 5] [-- FLAG ...]

It starts `octavo serve`. Each round sends three prompts with the same prefix of random tokens and
different tails of 16 tokens, and requests 16 tokens each. It sends the last prompt again under
another salt, which shares no prefix, to compare the tokens. A model with states caches the state at
the prefix's end when it sees the prefix for the second time. The time is the client's, from sending
the request to its first token. The last lines have the medians, and the ratio of the first to the
third. `--model` also takes the name of a model with random weights from `benchmarks.peers.shapes`:
falcon-h1 and granite-4-h have states.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.peers import shapes
from octavo import AsyncClient, Delta, Finished
from octavo.cli.local_server import local_server

TAIL = 16
VOCABULARY = range(256, 40_000)
"""Lowest token id of prompts: the first tokens of a vocabulary are often special."""


OUTPUT = 16
"""Output tokens of each prompt."""


class Answer(NamedTuple):
    """The result of a prompt.

    Attributes:
        seconds: Seconds to the first token.
        tokens: The output tokens.
        cached: Cached prompt tokens.
    """

    seconds: float
    tokens: list[int]
    cached: int


async def ask(client: AsyncClient, prompt: list[int], salt: str = "") -> Answer:
    """Send a prompt; answers under other salts share no cached prefix."""
    began, tokens, seconds, cached = time.perf_counter(), list[int](), 0.0, 0
    stream = client.generate(
        prompt,
        max_tokens=OUTPUT,
        temperature=0,
        ignore_eos=True,
        token_ids=True,
        cache_salt=salt,
    )
    async for event in stream.events():
        if isinstance(event, Delta) and event.token_ids:
            seconds = seconds or time.perf_counter() - began
            tokens += event.token_ids
        elif isinstance(event, Finished):
            cached = event.usage.cached_tokens
    print(f"{seconds * 1e3:8.1f} ms, {cached:4} tokens cached")
    return Answer(seconds, tokens, cached)


async def measure(
    address: str, prefix_tokens: int, rounds: int
) -> tuple[dict[str, list[float]], int]:
    """Time prompts whose prefix is new, seen once, and cached.

    Returns:
        The seconds to the first token in each round, and the number of rounds in which the prompt
        with a cached prefix had the same output as without.
    """
    draw = random.Random(0)
    times: dict[str, list[float]] = {"new": [], "seen once": [], "cached": []}
    same = 0
    async with AsyncClient(address) as client:
        await ask(client, draw.choices(VOCABULARY, k=prefix_tokens + TAIL))  # warm-up
        for number in range(rounds):
            prefix = draw.choices(VOCABULARY, k=prefix_tokens)
            for found in times.values():
                prompt = prefix + draw.choices(VOCABULARY, k=TAIL)
                answer = await ask(client, prompt)
                found.append(answer.seconds)
            again = await ask(client, prompt, salt=f"round {number}")
            same += answer.tokens == again.tokens and answer.cached > 0 == again.cached
    return times, same


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="as `octavo serve` takes it, or a shape")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that both prompts share")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="more flags of `octavo serve`, after --")
    options = parser.parse_args()
    model = options.model
    if model in shapes.SHAPES:
        model = str(shapes.provide(model, Path(tempfile.gettempdir()) / "octavo-prefix-caching"))
    with local_server(model, *options.flags) as address:
        times, same = asyncio.run(measure(address, options.prefix, options.rounds))
    print(f"\ntime to the first token, median of {options.rounds} rounds:")
    for name, seconds in times.items():
        print(f"  prefix of {options.prefix} tokens {name}: {median(seconds) * 1e3:8.1f} ms")
    print(f"  ratio: {median(times['new']) / median(times['cached']):.1f}x")
    print(f"the same {OUTPUT} tokens as without the cache: {same} of {options.rounds}")


if __name__ == "__main__":
    main()
