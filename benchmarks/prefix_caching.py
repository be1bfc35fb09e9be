"""Times the first token of a long prompt, new to a server and again with its prefix cached.

    python benchmarks/prefix_caching.py [--model demo] [--prefix 1000] [--rounds 5]

Starts `octavo serve` and talks to it as any client does. Each round takes a
prefix of random tokens and asks for one token after it twice, each time with
another end of 16 tokens. The time is the client's, from sending the request to
its first token. The last lines give the medians and their ratio.
"""

import argparse
import random
import statistics
import time

from octavo import Client, Delta
from octavo.cli.local_server import local_server

TAIL = 16
"""Tokens of each prompt after the prefix."""


def time_first_token(client: Client, prompt: list[int]) -> tuple[float, int]:
    """Returns seconds to the first token, and how many of the prompt's were cached."""
    began = time.perf_counter()
    stream = client.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True, token_ids=True)
    first = None
    for event in stream.events():
        if isinstance(event, Delta) and first is None:
            first = time.perf_counter() - began
    assert first is not None
    assert stream.accepted is not None
    return first, stream.accepted.cached_tokens


def main() -> None:
    """Runs the rounds and prints them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--prefix", type=int, default=1000, help="tokens that both prompts share")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    draw = random.Random(0)
    new, again = [], []
    with local_server(arguments.model) as address, Client(address) as client:
        vocabulary = client.list_models()[0].vocab_size

        def tokens(count: int) -> list[int]:
            # The first tokens of a vocabulary are often special ones.
            return [draw.randrange(256, vocabulary) for _ in range(count)]

        time_first_token(client, tokens(arguments.prefix + TAIL))  # warms the server up
        for number in range(arguments.rounds):
            prefix = tokens(arguments.prefix)
            for times in (new, again):
                seconds, cached = time_first_token(client, prefix + tokens(TAIL))
                times.append(seconds)
                print(f"round {number + 1}: {seconds * 1e3:8.1f} ms, {cached:4} tokens cached")
    before, after = statistics.median(new), statistics.median(again)
    print(f"\ntime to the first token, median of {arguments.rounds} rounds:")
    print(f"  prefix of {arguments.prefix} tokens new:    {before * 1e3:8.1f} ms")
    print(f"  prefix of {arguments.prefix} tokens cached: {after * 1e3:8.1f} ms")
    print(f"  ratio: {before / after:.1f}x")


if __name__ == "__main__":
    main()
