"""Quantizes expert layers for a GPU, at load or from quantized checkpoints.

Experts are packed one by one where the model was loaded, and moved to the GPU layer by layer.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.engine.models.experts.expert_layer import ExpertLayer
from octavo.engine.models.experts.quantized_experts import QuantizedExperts
from octavo.engine.models.quantization.formats.base import ScaledE2m1, StoredWeight
from octavo.engine.models.quantization.formats.stored_experts import stored_experts
from octavo.engine.models.quantization.gpu_weight import GpuWeight, stored_weight
from octavo.engine.models.read_weights import QuantizedCheckpoint
from octavo.kernels.quantized import QuantizedWeight, join, make_e2m1, widen_scales


def round_experts(
    layer: ExpertLayer, device: torch.device, round_weight: Callable[[Tensor], GpuWeight | None]
) -> QuantizedExperts | None:
    """Return a layer's experts with rounded weights; None if they must not be rounded.

    Args:
        layer: The layer.
        device: The device for the layers.
        round_weight: Rounds a weight, `[outputs, inputs]`.
    """
    ups, downs = (
        [
            rounded.weight
            for number in range(layer.count)
            if (rounded := round_weight(weight(number)))
        ]
        for weight in (layer.up, layer.down)
    )
    return _make(layer, ups, downs, device) if len(ups) == len(downs) == layer.count else None


def pack_experts(
    layer: ExpertLayer, checkpoint: QuantizedCheckpoint, device: torch.device
) -> QuantizedExperts | None:
    """Return a layer's experts as stored; None if kernels do not support all of them.

    Args:
        layer: The layer, with dequantized weights.
        checkpoint: Its checkpoint.
        device: The device for the layers.
    """
    ups: list[QuantizedWeight] = []
    downs: list[QuantizedWeight] = []
    count = 0
    for first, second in stored_experts(checkpoint, layer):
        parts = [_unordered(part) for part in (*first, second)]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        ups += known[:-1]
        downs.append(known[-1])
        count += 1
    return _make(layer, ups, downs, device) if count == layer.count else None


def _unordered(stored: StoredWeight) -> QuantizedWeight | None:
    """Return an expert's weight for the kernels; None if its inputs are permuted."""
    if isinstance(stored, ScaledE2m1):
        return make_e2m1(stored.codes[0], stored.exponents[0])
    weight = stored_weight(stored)
    return None if weight is None or weight.order is not None else weight.weight


def _make(
    layer: ExpertLayer,
    ups: Sequence[QuantizedWeight],
    downs: Sequence[QuantizedWeight],
    device: torch.device,
) -> QuantizedExperts | None:
    up, down = _joined(ups), _joined(downs)
    if up is None or down is None:
        return None
    return QuantizedExperts(layer, up, down).to(device)


def _joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Join the weights; None if they have different types."""
    if not all(map(weights[0].fits, weights)):  # perhaps because some scales fit into 16 bits
        weights = list(map(widen_scales, weights))
    return join(weights) if all(map(weights[0].fits, weights)) else None
