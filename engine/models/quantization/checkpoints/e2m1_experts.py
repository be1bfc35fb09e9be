"""Packs experts in e2m1 for the CPU kernels, as a checkpoint stores them."""

import torch
from torch import Tensor

from octavo.engine.models.experts.expert_layer import ExpertLayer
from octavo.engine.models.experts.packed_experts import PackedExperts, arranged, padded, stacked
from octavo.engine.models.quantization.checkpoints.base import ScaledE2m1
from octavo.engine.models.quantization.checkpoints.reader import QuantizedCheckpoint
from octavo.kernels.cpu import experts as kernels
from octavo.kernels.cpu.experts import PackedProduct
from octavo.kernels.cpu.linear import GROUP


def pack_e2m1_experts(layer: ExpertLayer, checkpoint: QuantizedCheckpoint) -> PackedExperts | None:
    """Return a layer's experts with the numbers that are stored; None if these are not e2m1.

    Args:
        layer: The layer, with the weights dequantized.
        checkpoint: Its checkpoint.
    """
    if not layer.activation.gated or kernels is None:
        return None
    up, down = (_packed_product(layer, name, checkpoint) for name in ("up", "down"))
    return None if up is None or down is None else PackedExperts(layer.activation, up, down)


def _packed_product(
    layer: ExpertLayer, name: str, checkpoint: QuantizedCheckpoint
) -> PackedProduct | None:
    """Return a product of all experts; None if the layer's weights are not those in the file."""
    stored_name = f"{layer.path}.{'gate_up_proj' if name == 'up' else 'down_proj'}"
    if stored_name not in checkpoint.shapes:
        return None
    stored = checkpoint.read(stored_name)
    if not isinstance(stored, ScaledE2m1):
        return None
    if not all(_is_same(layer, name, stored, number) for number in range(layer.count)):
        return None

    def panels(number: int) -> Tensor:
        assert kernels is not None
        codes = stored.codes[number].reshape(*stored.exponents[number].shape, GROUP)
        parts = (_ordered(layer, name, own) for own in (codes, stored.exponents[number]))
        return kernels.pack_e2m1(*(arranged(layer, name, part) for part in parts))

    bias = layer.up_bias if name == "up" else layer.down_bias
    return PackedProduct(
        stacked(layer.count, panels),
        stacked(layer.count, lambda number: padded(layer, name, bias(number))),
    )


def _is_same(layer: ExpertLayer, name: str, stored: ScaledE2m1, number: int) -> bool:
    """Return whether a layer's expert has the weights that are stored."""
    own = layer.up(number) if name == "up" else layer.down(number)
    found = stored.expert(number).dequantize()[0].t().to(own.dtype)
    return torch.equal(_ordered(layer, name, found), own)


def _ordered(layer: ExpertLayer, name: str, values: Tensor) -> Tensor:
    """Return outputs as they are stored in the order of `ExpertLayer`."""
    return layer.gates_first(values, 0) if name == "up" else values
