"""4-bit weights, with a scale and a zero point for every 32 inputs.

Steps of a few tokens are bound by reading weights, and read the 4-bit ones. Larger steps are
bound by arithmetic, and use the same values in 8 bits. The head has 8-bit weights. Of experts there
are only the 4-bit weights: a step gives each a few tokens.
"""

import torch
from torch import Tensor, nn

from octavo.engine.models.experts.expert_layer import ExpertLayer
from octavo.engine.models.experts.packed_experts import PackedExperts
from octavo.engine.models.experts.packed_experts import has_kernels as has_expert_kernels
from octavo.engine.models.linear.packed_linear import (
    FUSED,
    PackedLayer,
    define_operator,
    has_kernels,
)
from octavo.engine.models.quantization.base import Scheme
from octavo.engine.models.quantization.calibration import ExpertInputs, Inputs
from octavo.engine.models.quantization.experts import experts_to_int4, experts_to_int8
from octavo.engine.models.quantization.gpu_weight import (
    GpuWeight,
    round_to_int4,
    round_to_int8,
)
from octavo.engine.models.quantization.int8 import Int8, PackedInt8Linear, to_int8
from octavo.engine.models.quantization.rounding import round_to_4_bits
from octavo.kernels.cpu import linear as kernels
from octavo.kernels.cpu.linear import GROUP

NIBBLE_BITS = 5
"""Bits per 4-bit weight, with its share of a group's scale and zero point."""


class Int4(Scheme):
    """4-bit weights; 8-bit ones for the head and layers whose inputs do not divide into groups."""

    tolerance = 0.7
    row_tolerance = Int8.tolerance  # the inputs of many rows are rounded to bytes
    takes_head = True

    def convert(self, layer: nn.Linear, inputs: Inputs, *, is_head: bool) -> nn.Module:
        """Return a 4-bit layer, or an 8-bit one where there are no kernels for 4 bits."""
        weight = layer.weight.detach()
        if is_head or layer.in_features % GROUP:
            return to_int8(layer, weight.float(), inputs)
        quantized, scale, zero = round_to_4_bits(weight.float(), weight.dtype)
        values = (quantized - 8) * scale.float() + zero.float()
        int8 = to_int8(layer, values.flatten(1), inputs)
        if not isinstance(int8, PackedInt8Linear):
            return int8
        return PackedInt4Linear(layer, int8, quantized, scale[..., 0], zero[..., 0])

    def bits(self, layer: nn.Linear, *, is_head: bool) -> int:
        """Return the bits per weight: of 4-bit layers there are 8-bit ones too."""
        whole = is_head or layer.in_features % GROUP or not has_kernels(layer)
        return 8 if whole else 8 + NIBBLE_BITS

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
        """Return the bits per weight of experts, where this CPU has a kernel for them."""
        if has_expert_kernels(layer, torch.uint8):
            return NIBBLE_BITS
        return 8 if has_expert_kernels(layer, torch.int8) else None

    def convert_experts(self, layer: ExpertLayer, inputs: ExpertInputs) -> PackedExperts | None:
        """Return 4-bit experts, or 8-bit ones where there is no kernel for 4 bits."""
        if has_expert_kernels(layer, torch.uint8):
            return experts_to_int4(layer)
        return experts_to_int8(layer, inputs) if has_expert_kernels(layer, torch.int8) else None


class PackedInt4Linear(PackedLayer):
    """A 4-bit layer for the kernels of `octavo.kernels.cpu.linear`.

    Args:
        linear: The layer to replace.
        int8: The same weights in 8 bits.
        quantized: `[out, groups, GROUP]`, the weights rounded to 0 to 15.
        scale: `[out, groups]`.
        zero: `[out, groups]`; a weight is `(quantized - 8) * scale + zero`.
    """

    nibbles: Tensor

    def __init__(
        self,
        linear: nn.Linear,
        int8: PackedInt8Linear,
        quantized: Tensor,
        scale: Tensor,
        zero: Tensor,
    ) -> None:
        super().__init__(linear)
        assert kernels is not None
        self.int8 = int8
        self.register_buffer("nibbles", kernels.pack_int4(quantized, scale, zero))

    def multiply(self, rows: Tensor) -> Tensor:
        """Map `[rows, in_features]` to `[rows, outputs]`."""
        int8 = self.int8
        out: Tensor = torch.ops.octavo.packed_linear_int4(
            *(rows, self.outputs, int8.panels, self.bias),
            *(int8.factors, int8.scale, int8.row_sums, self.nibbles, *self.stages),
        )
        return out


define_operator(
    "packed_linear_int4(Tensor x, int outputs, Tensor panels, Tensor bias, Tensor factors,"
    f" Tensor scales, Tensor row_sums, Tensor nibbles, {FUSED}) -> Tensor",
    None if kernels is None else kernels.linear_int4,
)
SCHEME = Int4()
