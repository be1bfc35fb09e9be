"""Packs a checkpoint's e2m1 experts unchanged for the CPU kernels."""

from collections.abc import Callable, Sequence

from torch import Tensor

from octavo.engine.models.experts.expert_layer import ExpertLayer
from octavo.engine.models.experts.packed_experts import PackedExperts, arranged, padded, stacked
from octavo.engine.models.quantization.formats.base import ScaledE2m1
from octavo.engine.models.quantization.formats.stored_experts import StoredExpert
from octavo.kernels.cpu import experts as kernels
from octavo.kernels.cpu.experts import PackedProduct
from octavo.kernels.cpu.linear import GROUP


def pack_e2m1(layer: ExpertLayer, experts: Sequence[StoredExpert]) -> PackedExperts | None:
    """Return a layer's experts with their stored values; None if these are not e2m1.

    Args:
        layer: The layer.
        experts: All experts of the layer.
    """
    ups = [weight for first, _ in experts for weight in first if isinstance(weight, ScaledE2m1)]
    downs = [weight for _, weight in experts if isinstance(weight, ScaledE2m1)]
    if len(ups) < layer.count or len(downs) < layer.count:
        return None
    return PackedExperts(
        layer.activation,
        _product(layer, "up", ups, layer.up_bias),
        _product(layer, "down", downs, layer.down_bias),
    )


def _product(
    layer: ExpertLayer, name: str, weights: Sequence[ScaledE2m1], bias: Callable[[int], Tensor]
) -> PackedProduct:
    def panels(number: int) -> Tensor:
        assert kernels is not None
        codes = weights[number].codes[0]
        codes = codes.reshape(len(codes), -1, GROUP)
        parts = (arranged(layer, name, values) for values in (codes, weights[number].exponents[0]))
        return kernels.linear.pack_e2m1(*parts)

    return PackedProduct(
        stacked(layer.count, panels),
        stacked(layer.count, lambda number: padded(layer, name, bias(number))),
    )
