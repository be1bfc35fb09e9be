"""The activations between an expert's two products, as in transformers' models."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
}
"""Activation names, in the order of the enum in cpu/activation.h."""


class Activation(NamedTuple):
    """An expert's activation.

    With a gate it is `kind(gate) * (up + offset)`: SwiGLU and its relatives (Shazeer 2020), and
    gpt-oss's clamped one, which has an offset of 1.

    Attributes:
        kind: A key of `KINDS`.
        gated: Whether there is a gate.
        alpha: Makes silu `x * sigmoid(alpha * x)`.
        limit: Largest value of the gate, and largest magnitude of the up projection; 0: none.
        offset: Added to the up projection.
    """

    kind: str = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float = 0.0
    offset: float = 0.0

    @property
    def number(self) -> int:
        """The kind's number in C++."""
        return list(KINDS).index(self.kind)

    @property
    def arguments(self) -> tuple[int, int, float, float, float]:
        """The five arguments of an operator that stand for it."""
        return self.number, int(self.gated), self.alpha, self.limit, self.offset

    def __call__(self, projected: Tensor) -> Tensor:
        """Map `[..., 2 * inner]`, gates and then up projections, to `[..., inner]`.

        Without a gate, map `[..., inner]` to the same.
        """
        if not self.gated:
            return self._activate(projected)
        gate, up = projected.chunk(2, -1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self._activate(gate) * (up + self.offset)

    def _activate(self, x: Tensor) -> Tensor:
        if self.kind == "silu":
            return x * torch.sigmoid(self.alpha * x)
        return KINDS[self.kind](x)
