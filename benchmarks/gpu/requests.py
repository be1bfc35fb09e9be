"""Requests of random tokens with ShareGPT's lengths."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.cli.bench.settings import DATA_SETS, Shape
from octavo.cli.bench.workload import draw_lengths


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Requests of random tokens.

    Attributes:
        tokens: Token ids of each prompt.
        outputs: `[requests]`; tokens of each output.
        n: Outputs of each request.
    """

    tokens: list[list[int]]
    outputs: npt.NDArray[np.int64]
    n: int

    @property
    def prompts(self) -> npt.NDArray[np.int64]:
        """`[requests]`; tokens of each prompt."""
        return np.array([len(tokens) for tokens in self.tokens])


def make_requests(count: int, *, n: int, vocab_size: int, most: int) -> Requests:
    """Return random requests, the same ones every time.

    Args:
        count: Number of requests.
        n: Outputs of each request.
        vocab_size: Size of the vocabulary.
        most: Maximum tokens of a prompt, and of an output.
    """
    rng = np.random.default_rng(0)
    prompts, outputs = (draw_lengths(each, rng, count, most) for each in DATA_SETS[Shape.SHAREGPT])
    tokens = [rng.integers(1, vocab_size, length).tolist() for length in prompts]
    return Requests(tokens, outputs, n)
