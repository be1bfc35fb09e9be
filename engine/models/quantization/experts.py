"""Quantizes layers of experts.

All experts of a layer get the same hidden states, so in 8 bits they share SmoothQuant's factors.
Activations between the two products differ per expert, so each has its own factors there.
"""

from collections.abc import Callable
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from octavo.engine.models.experts.expert_layer import ExpertLayer
from octavo.engine.models.experts.packed_experts import (
    PackedExperts,
    arranged,
    pack_product,
    padded,
    stacked,
)
from octavo.engine.models.quantization.calibration import ExpertInputs
from octavo.engine.models.quantization.rounding import (
    ALPHAS,
    output_error,
    round_to_4_bits,
    round_weights,
    smooth,
    widest_weights,
)
from octavo.kernels.cpu import experts as kernels
from octavo.kernels.cpu.experts import PackedProduct

JUDGES = 4
"""Number of experts, those with the most rows, that determine a layer's exponent."""


def experts_to_int8(layer: ExpertLayer, inputs: ExpertInputs) -> PackedExperts:
    """Return a layer's experts with 8-bit weights, and activations rounded at run time."""
    judges = inputs.busiest(layer.count, JUDGES)
    absmax = inputs.rows.float().abs().amax(0)
    widest = torch.stack([widest_weights(layer.up(one)) for one in range(layer.count)]).amax(0)

    def shared(_: int, alpha: float) -> Tensor:
        return smooth(absmax, widest, alpha)

    def expert_factors(expert: int, alpha: float) -> Tensor:
        rows = _between(layer, inputs, expert)
        return smooth(rows.abs().amax(0), widest_weights(layer.down(expert)), alpha)

    alpha = _best_alpha(judges, layer.up, inputs.of, shared)
    up = _pack(layer, "up", shared(0, alpha)[None])
    alpha = _best_alpha(judges, layer.down, partial(_between, layer, inputs), expert_factors)
    down = _pack(layer, "down", stacked(layer.count, lambda expert: expert_factors(expert, alpha)))
    return PackedExperts(layer.activation, up, down)


def experts_to_int4(layer: ExpertLayer) -> PackedExperts:
    """Return a layer's experts with 4-bit weights."""
    up, down = (pack_product(layer, name, _to_nibbles) for name in ("up", "down"))
    return PackedExperts(layer.activation, up, down)


def _to_nibbles(weight: Tensor) -> Tensor:
    assert kernels is not None
    quantized, scale, zero = round_to_4_bits(weight.float(), torch.bfloat16)
    return kernels.linear.pack_int4(quantized, scale[..., 0], zero[..., 0])


def _between(layer: ExpertLayer, inputs: ExpertInputs, expert: int) -> Tensor:
    """Return the inputs of an expert's second product on the calibration text."""
    projected = inputs.of(expert) @ layer.up(expert).float().t() + layer.up_bias(expert)
    return layer.activation(projected)


def _best_alpha(
    experts: list[int],
    weight: Callable[[int], Tensor],
    inputs: Callable[[int], Tensor],
    factors: Callable[[int, float], Tensor],
) -> float:
    """Return the exponent with the least error of some experts' outputs."""

    def error(alpha: float) -> float:
        return fmean(
            output_error(
                expert_weight, inputs(one), round_weights(expert_weight, factors(one, alpha))
            )
            for one in experts
            for expert_weight in (weight(one).float(),)
        )

    return min(ALPHAS, key=error)


def _pack(layer: ExpertLayer, name: str, factors: Tensor) -> PackedProduct:
    """Pack a product in 8 bits.

    Args:
        layer: The layer.
        name: "up" or "down".
        factors: `[experts or 1, inputs]`, factors of the weights.
    """
    assert kernels is not None
    pack, weight = kernels.linear.pack, layer.up if name == "up" else layer.down
    panels, scales = [], []
    for expert in range(layer.count):
        expert_factors = factors[expert if len(factors) > 1 else 0]
        whole, scale, sums, _ = round_weights(weight(expert), expert_factors)
        panels.append(pack(arranged(layer, name, whole)))
        scales.append(torch.stack([padded(layer, name, scale), padded(layer, name, sums)]))
    bias = layer.up_bias if name == "up" else layer.down_bias
    return PackedProduct(
        torch.stack(panels),
        stacked(layer.count, lambda expert: padded(layer, name, bias(expert))),
        1 / factors,
        torch.stack(scales),
    )
