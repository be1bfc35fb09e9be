"""Rounding of weights in C++; same bits as `octavo.engine.models.quantization.rounding`."""

from typing import Any

import torch
from torch import Tensor

from octavo.kernels import huge_pages
from octavo.kernels.cpu.blocks import FORMATS
from octavo.kernels.cpu.linear import GROUP


class RoundingKernels:
    """The kernels of round_weights.cpp.

    Args:
        operators: The operators, `torch.ops.octavo_cpu`.
    """

    def __init__(self, operators: Any) -> None:  # noqa: ANN401 - any namespace
        self._operators = operators

    def to_q4_1(self, weight: Tensor) -> Tensor:
        """Round a weight to 4 bits; each group gets the scale with the least squared error.

        Args:
            weight: `[outputs, inputs]` bfloat16 or float32, whole groups.

        Returns:
            `[outputs, bytes]` uint8, in GGUF's format Q4_1.
        """
        weight = _readable(weight)
        outputs, groups = weight.shape[0], weight.shape[1] // GROUP
        out = torch.empty((outputs, groups * FORMATS["Q4_1"].unit_bytes), dtype=torch.uint8)
        huge_pages.ask_for(out)
        self._operators.round_to_q4_1(weight, out)
        return out

    def to_bytes(self, weight: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Multiply a weight by its inputs' factors and round it to 8 bits.

        Args:
            weight: `[outputs, inputs]`, floats.
            factors: `[inputs]` float32.

        Returns:
            `[outputs, inputs]` int8, `[outputs]` float32 scales, and `[outputs]` float32 sums of
            scaled weights.
        """
        weight, factors = _readable(weight), factors.contiguous()
        outputs, inputs = weight.shape
        out = torch.empty((outputs, inputs), dtype=torch.int8)
        huge_pages.ask_for(out)
        scale, sums = torch.empty(2, outputs)
        self._operators.round_to_bytes(weight, factors, out, scale, sums)
        return out, scale, sums

    def widest(self, weight: Tensor) -> Tensor:
        """Return the greatest magnitude of each input's weights, `[inputs]` float32.

        Args:
            weight: `[outputs, inputs]`, floats.
        """
        weight = _readable(weight)
        out = torch.empty(weight.shape[1])
        self._operators.find_widest(weight, out)
        return out


def _readable(weight: Tensor) -> Tensor:
    """Return a weight as C++ can read it."""
    if weight.dtype not in {torch.bfloat16, torch.float32}:
        weight = weight.float()
    return weight if weight.stride(1) == 1 else weight.contiguous()
