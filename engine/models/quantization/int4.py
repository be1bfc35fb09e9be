"""4-bit weights, with a scale and a zero point for every 32 inputs.

Linear layers run as blocks of GGUF's Q4_1, with inputs rounded to bytes. The head has 8-bit
weights. Experts run with inputs in 16 bits.
"""

import torch
from torch import Tensor, nn

from octavo.engine.models.deferred import present
from octavo.engine.models.experts.expert_layer import ExpertLayer
from octavo.engine.models.experts.packed_experts import PackedExperts
from octavo.engine.models.experts.packed_experts import has_kernels as has_expert_kernels
from octavo.engine.models.linear.packed_linear import has_quantized_kernels
from octavo.engine.models.quantization.base import Scheme
from octavo.engine.models.quantization.calibration import ExpertInputs, Inputs
from octavo.engine.models.quantization.experts import experts_to_int4, experts_to_int8
from octavo.engine.models.quantization.formats.block_layers import BlockWeights
from octavo.engine.models.quantization.gpu_weight import (
    GpuWeight,
    round_to_int4,
    round_to_int8,
)
from octavo.engine.models.quantization.int8 import to_int8
from octavo.kernels.cpu import rounding as kernels
from octavo.kernels.cpu.blocks import FORMATS
from octavo.kernels.cpu.linear import GROUP

NIBBLE_BITS = 5
"""Bits per 4-bit weight, including its share of a group's scale and zero point."""


class Int4(Scheme):
    """4-bit weights; 8 bits for the head and layers whose inputs do not divide into groups."""

    tolerance = 0.7
    takes_head = True

    def reads_inputs(self, layer: nn.Linear, *, is_head: bool) -> bool:
        """Return whether a layer gets 8 bits, whose rounding depends on its inputs."""
        return bool(is_head or layer.in_features % GROUP or not has_quantized_kernels(layer))

    def convert(self, layer: nn.Linear, inputs: Inputs | None, *, is_head: bool) -> nn.Module:
        """Return a 4-bit layer, or an 8-bit one without kernels for 4 bits."""
        weight = present(layer.weight.detach())
        if self.reads_inputs(layer, is_head=is_head):
            assert inputs is not None
            return to_int8(layer, weight, inputs)
        assert kernels is not None
        return BlockWeights.of(kernels.to_q4_1(weight), FORMATS["Q4_1"]).layer(layer)

    def bits(self, layer: nn.Linear, *, is_head: bool) -> int:
        """Return the bits per weight."""
        return 8 if self.reads_inputs(layer, is_head=is_head) else NIBBLE_BITS

    def round_for_gpu(self, weight: Tensor) -> GpuWeight:
        """Round a weight to 4 bits; activations stay in 16 bits."""
        return round_to_int4(weight)

    def round_head_for_gpu(self, weight: Tensor) -> GpuWeight:
        """Round the head's weight to 8 bits."""
        return round_to_int8(weight)

    def gpu_bits(self, *, is_head: bool) -> float:
        """Return the bits per weight: 8 for the head."""
        return 8 if is_head else NIBBLE_BITS

    def expert_bits(self, layer: ExpertLayer) -> int | None:
        """Return the bits per weight of experts, if this CPU has a kernel for them."""
        if has_expert_kernels(layer, torch.uint8):
            return NIBBLE_BITS
        return 8 if has_expert_kernels(layer, torch.int8) else None

    def convert_experts(self, layer: ExpertLayer, inputs: ExpertInputs) -> PackedExperts | None:
        """Return 4-bit experts, or 8-bit ones without a kernel for 4 bits."""
        if has_expert_kernels(layer, torch.uint8):
            return experts_to_int4(layer)
        return experts_to_int8(layer, inputs) if has_expert_kernels(layer, torch.int8) else None


SCHEME = Int4()
