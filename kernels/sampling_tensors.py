"""Sampling parameters, one of each per row of logits."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

MIN_TEMPERATURE = 1e-30
"""Minimum temperature but 0; lower ones count as this: only the most likely tokens keep weight."""


class SamplingTensors(NamedTuple):
    """Sampling parameters of `n` rows, on the host.

    Attributes:
        temperatures: `[n]`; 0 selects the most likely token.
        top_k: `[n]` integers; 0 is off.
        top_p: `[n]`, from (0, 1]; 1 is off.
        min_p: `[n]`, from [0, 1]; 0 is off.
        uniforms: `[n]`, drawn from [0, 1).
    """

    temperatures: NDArray[np.float64]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    uniforms: NDArray[np.float64]

    @classmethod
    def greedy(cls, n: int) -> Self:
        """Return parameters that select the most likely token in each of `n` rows."""
        zeros = np.zeros(n)
        return cls(zeros, np.zeros(n, np.int64), np.ones(n), zeros, zeros)

    def select(self, rows: NDArray[np.intp]) -> Self:
        """Return the parameters of some rows."""
        return self.__class__(
            self.temperatures[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.uniforms[rows],
        )
