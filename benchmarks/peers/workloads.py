"""The requests to every peer: the same lengths in every round, but new tokens."""

import itertools
import random
from dataclasses import dataclass

from benchmarks.peers.workers.protocol import Request

REQUESTS = 48
PROMPT_TOKENS = 7_853
OUTPUT_TOKENS = 5_406
SHORTEST = 8
SINGLE_PROMPT_TOKENS = 24
SINGLE_OUTPUT_TOKENS = 128
VOCABULARY = 49_152
"""Size of the demo model's vocabulary."""
SPECIAL_TOKENS = 256
"""Lowest token id of prompts."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive at once. Rates are output tokens per second."""

    name: str
    title: str
    requests: tuple[Request, ...]

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(request.output_tokens for request in self.requests)


def mixed(seed: int, count: int = REQUESTS, vocabulary: int = VOCABULARY) -> Workload:
    """Return a chat mix: 48 requests, most of them short, a few long.

    Args:
        seed: Seed of the prompts' tokens; the lengths are always the same.
        count: Number of requests, at most `REQUESTS`.
        vocabulary: Size of the model's vocabulary.
    """
    shapes = random.Random(0)
    prompts = spread(shapes, REQUESTS, PROMPT_TOKENS)
    outputs = spread(shapes, REQUESTS, OUTPUT_TOKENS)
    draw = random.Random(f"mixed {seed}")
    wanted = list(zip(prompts, outputs, strict=True))[:count]
    requests = tuple(_request(draw, prompt, output, vocabulary) for prompt, output in wanted)
    return Workload("mixed", f"{len(requests)} requests at once", requests)


def single(seed: int, vocabulary: int = VOCABULARY) -> Workload:
    """Return one short question, with its answer's length."""
    draw = random.Random(f"single {seed}")
    request = _request(draw, SINGLE_PROMPT_TOKENS, SINGLE_OUTPUT_TOKENS, vocabulary)
    return Workload("single", "one request", (request,))


def spread(draw: random.Random, count: int, total: int) -> list[int]:
    """Return log-normal lengths, as in conversations, with an exact total.

    Args:
        draw: The random number generator.
        count: Number of lengths.
        total: Their sum; at least `count * SHORTEST`.

    Returns:
        Lengths, none below `SHORTEST`.
    """
    weights = [draw.lognormvariate(0.0, 0.8) for _ in range(count)]
    spare = total - count * SHORTEST
    shares = itertools.accumulate(weights, initial=0.0)
    cuts = [round(spare * share / sum(weights)) for share in shares]
    return [SHORTEST + end - start for start, end in itertools.pairwise(cuts)]


def _request(draw: random.Random, prompt: int, output: int, vocabulary: int) -> Request:
    tokens = range(SPECIAL_TOKENS, vocabulary)
    return Request([draw.choice(tokens) for _ in range(prompt)], output)
