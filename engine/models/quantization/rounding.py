"""Rounds weights to 8 and to 4 bits, and activations to 8."""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cpu import rounding as kernels
from octavo.kernels.cpu.linear import GROUP

ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7)
"""Values of SmoothQuant's alpha to try for each layer."""
EPSILON = 1e-8  # avoids division by zero
LEVELS = (15, 14, 13, 12)
"""Numbers of steps between a group's least and greatest weight to try. Weights that were in 4 bits
before may not use their whole range; fewer steps find their scale again."""


class QuantizedWeights(NamedTuple):
    """Weights in 8 bits.

    Attributes:
        weight: `[out, in]` int8.
        scale: `[out]`; the weights are `weight * scale`.
        row_sums: `[out]`, the sum of each output's scaled weights.
        factors: `[in]`, factors of the inputs before rounding.
    """

    weight: Tensor
    scale: Tensor
    row_sums: Tensor
    factors: Tensor


def smooth(absmax: Tensor, widest: Tensor, alpha: float) -> Tensor:
    """Return SmoothQuant's factors of the weights, `[in]`.

    Args:
        absmax: `[in]`, the greatest magnitude of each input.
        widest: `[in]`, the greatest magnitude of its weights.
        alpha: The exponent.
    """
    widest = widest.clamp_min(EPSILON)
    return (absmax.clamp_min(1e-5) ** alpha / widest ** (1 - alpha)).clamp_min(1e-4)


def round_weights(weight: Tensor, factors: Tensor) -> QuantizedWeights:
    """Multiply weights by the factors of `smooth`, and round them."""
    if kernels is None:
        return QuantizedWeights(*to_bytes(weight, factors), 1 / factors)
    return QuantizedWeights(*kernels.to_bytes(weight, factors), 1 / factors)


def to_bytes(weight: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round a weight to 8 bits, with the same result as `RoundingKernels.to_bytes`."""
    weight = weight.float() * factors
    scale = weight.abs().amax(1).clamp_min(EPSILON) / 127
    whole = (weight / scale[:, None]).round_().to(torch.int8)
    return whole, scale, sum_rows(whole, scale)


def sum_rows(whole: Tensor, scale: Tensor) -> Tensor:
    """Return the sum of each output's scaled weights, `[out]`."""
    return whole.sum(1, dtype=torch.int32) * scale


def widest_weights(weight: Tensor) -> Tensor:
    """Return the greatest magnitude of each input's weights, `[in]` float32."""
    return weight.abs().amax(0).float() if kernels is None else kernels.widest(weight)


def output_error(weight: Tensor, samples: Tensor, quantized: QuantizedWeights) -> float:
    """Return the `row_error` of quantized weights' outputs."""
    rows, step, zero = round_rows(samples * quantized.factors)
    computed = (rows - zero) * step @ (quantized.weight * quantized.scale[:, None]).T
    return row_error(computed, samples @ weight.T)


def row_error(computed: Tensor, exact: Tensor) -> float:
    """Return the mean error of rows, relative to each row's norm."""
    return float(((computed - exact).norm(dim=1) / exact.norm(dim=1).clamp_min(EPSILON)).mean())


def round_rows(rows: Tensor, most: int = 255) -> tuple[Tensor, Tensor, Tensor]:
    """Round each row to integers from 0 to `most`; return them, each row's step and its zero."""
    least = rows.amin(1, keepdim=True).clamp_max(0)
    greatest = rows.amax(1, keepdim=True).clamp_min(0)
    step = ((greatest - least) / most).clamp_min(EPSILON)
    zero = (-least / step).round()
    return ((rows / step).round() + zero).clamp(0, most), step, zero


def round_to_4_bits(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize each group of weights to 16 levels, with the scale of least squared error.

    Returns:
        `[out, groups, GROUP]` 0 to 15; `[out, groups, 1]` scales and `[out, groups, 1]` zeros, of
        `dtype`: a weight is `(quantized - 8) * scale + zero`.
    """
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    least, greatest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    # Equal weights have no scale in float16.
    best = torch.zeros_like(groups), torch.zeros_like(least, dtype=dtype), least.to(dtype)
    least_error = torch.full_like(least, torch.inf)
    for levels in LEVELS:
        scale = ((greatest - least) / levels).clamp_min(EPSILON).to(dtype)
        zero = (least + 8 * scale.float()).to(dtype)
        quantized = ((groups - zero.float()) / scale.float() + 8).round_().clamp_(0, 15)
        values = (quantized - 8) * scale.float() + zero.float()
        error = (values - groups).square().sum(-1, keepdim=True)
        better = (error < least_error) & (scale > 0)
        best = (
            torch.where(better, quantized, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, zero, best[2]),
        )
        least_error = torch.where(better, error, least_error)
    return best
