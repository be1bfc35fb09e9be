"""Requests as long as ShareGPT's, of random tokens."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.memory_study.traces import SHAREGPT


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Some requests.

    Attributes:
        tokens: each one's prompt.
        outputs: `[requests]`; tokens of each output.
        n: outputs of each.
    """

    tokens: list[list[int]]
    outputs: npt.NDArray[np.int64]
    n: int

    @property
    def prompts(self) -> npt.NDArray[np.int64]:
        """`[requests]`; tokens of each prompt."""
        return np.array([len(tokens) for tokens in self.tokens])


def make_requests(count: int, *, n: int, vocab_size: int, most: int) -> Requests:
    """Draws requests; the same ones every time.

    Args:
        count: how many.
        n: outputs of each.
        vocab_size: of the model.
        most: tokens of a prompt, and of an output, at most.
    """
    rng = np.random.default_rng(0)
    prompts = SHAREGPT.prompt.draw(rng, count).clip(max=most)
    outputs = SHAREGPT.output.draw(rng, count).clip(max=most)
    tokens = [rng.integers(1, vocab_size, length).tolist() for length in prompts]
    return Requests(tokens, outputs, n)
