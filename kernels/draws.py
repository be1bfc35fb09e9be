"""How to draw tokens from rows of logits."""

from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

LEAST_TEMPERATURE = 1e-30
"""Anything colder is this cold: nothing but the most likely tokens is left either way."""


class Draws(NamedTuple):
    """One number of each for every row, on the host.

    Attributes:
        temperatures: `[n]`; 0 takes the most likely token.
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
        """The most likely tokens of `n` rows."""
        zeros = np.zeros(n)
        return cls(zeros, np.zeros(n, np.int64), np.ones(n), zeros, zeros)

    def of(self, rows: NDArray[np.intp]) -> Self:
        """Those of some rows alone."""
        return self.__class__(
            self.temperatures[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.uniforms[rows],
        )
