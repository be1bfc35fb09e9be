"""8-bit weights with a scale per output, and 8-bit activations quantized per token at run time.

Products of bytes run at twice the rate of bfloat16 ones. Activations have a few large channels
that would use up the 8-bit range; SmoothQuant (Xiao et al. 2023, equation 4) divides each channel
by a factor and multiplies its weights by it. The factors and their exponent are chosen per layer
on a short text: with one exponent for all layers, SmolLM2's perplexity grows more than twice as
much. The head is not quantized, as that would cost the most quality.
"""

import torch
from torch import Tensor, nn

from octavo.engine.models.deferred import present
from octavo.engine.models.experts.expert_layer import ExpertLayer
from octavo.engine.models.experts.packed_experts import PackedExperts
from octavo.engine.models.experts.packed_experts import has_kernels as has_expert_kernels
from octavo.engine.models.linear.packed_linear import (
    FUSED,
    PackedLayer,
    define_operator,
    has_quantized_kernels,
)
from octavo.engine.models.quantization.base import Scheme
from octavo.engine.models.quantization.calibration import ExpertInputs, Inputs
from octavo.engine.models.quantization.experts import experts_to_int8
from octavo.engine.models.quantization.gpu_weight import GpuWeight, round_to_int8
from octavo.engine.models.quantization.rounding import (
    ALPHAS,
    round_rows,
    round_weights,
    row_error,
    smooth,
    widest_weights,
)
from octavo.kernels.cpu import linear as kernels
from octavo.kernels.cpu_target import onednn_int8_saturates

JUDGES = 256
"""Number of evenly spaced outputs whose error determines a layer's exponent."""


class Int8(Scheme):
    """8-bit weights and activations; see this module's text."""

    tolerance = 0.35

    def convert(self, layer: nn.Linear, inputs: Inputs | None, *, is_head: bool) -> nn.Module:  # noqa: ARG002
        """Return an 8-bit layer."""
        assert inputs is not None
        return to_int8(layer, present(layer.weight.detach()), inputs)

    def bits(self, layer: nn.Linear, *, is_head: bool) -> int:  # noqa: ARG002
        """Return the bits per weight."""
        return 8

    def round_for_gpu(self, weight: Tensor) -> GpuWeight:
        """Round a weight to 8 bits; activations stay in 16 bits."""
        return round_to_int8(weight)

    def expert_bits(self, layer: ExpertLayer) -> int | None:
        """Return the bits per weight of experts, if this CPU has a kernel for them."""
        return 8 if has_expert_kernels(layer, torch.int8) else None

    def convert_experts(self, layer: ExpertLayer, inputs: ExpertInputs) -> PackedExperts | None:
        """Return 8-bit experts, if this CPU has a kernel for them."""
        return experts_to_int8(layer, inputs) if has_expert_kernels(layer, torch.int8) else None


def to_int8(
    layer: nn.Linear, weight: Tensor, inputs: Inputs
) -> "PackedInt8Linear | OneDnnInt8Linear":
    """Return an 8-bit layer.

    Args:
        layer: The layer to replace.
        weight: `[out, in]`, the weights to use.
        inputs: The layer's inputs on the calibration text.
    """
    kind = PackedInt8Linear if has_quantized_kernels(layer) else OneDnnInt8Linear
    widest = widest_weights(weight)
    judges = torch.linspace(0, len(weight) - 1, min(JUDGES, len(weight))).long()
    judged, rows = weight[judges], inputs.samples.to(layer.weight.dtype)
    outputs, width = judged.shape
    shape = nn.Linear(width, outputs, bias=False, dtype=rows.dtype, device="meta")
    exact = inputs.samples @ judged.float().T

    def error(factors: Tensor) -> float:
        # By the layer's own kernel: PyTorch's operators take longer than rounding all weights.
        computed = kind(shape, *round_weights(judged, factors))(rows)
        return row_error(computed, exact)

    factors = min((smooth(inputs.absmax, widest, alpha) for alpha in ALPHAS), key=error)
    return kind(layer, *round_weights(weight, factors))


class PackedInt8Linear(PackedLayer):
    """An 8-bit layer for the kernels of `octavo.kernels.cpu.linear`.

    Args:
        linear: The layer to replace.
        weight: See `QuantizedWeights`.
        scale: See `QuantizedWeights`.
        row_sums: See `QuantizedWeights`.
        factors: See `QuantizedWeights`.
    """

    panels: Tensor
    factors: Tensor
    scale: Tensor
    row_sums: Tensor

    def __init__(
        self, linear: nn.Linear, weight: Tensor, scale: Tensor, row_sums: Tensor, factors: Tensor
    ) -> None:
        super().__init__(linear)
        assert kernels is not None
        self.register_buffer("panels", kernels.pack(weight))
        self.register_buffer("factors", factors)
        self.register_buffer("scale", kernels.pad_outputs(scale))
        self.register_buffer("row_sums", kernels.pad_outputs(row_sums))

    def multiply(self, rows: Tensor) -> Tensor:
        """Map `[rows, in_features]` to `[rows, outputs]`."""
        out: Tensor = torch.ops.octavo.packed_linear_int8(
            *(rows, self.outputs, self.panels, self.bias),
            *(self.factors, self.scale, self.row_sums, *self.stages),
        )
        return out


class OneDnnInt8Linear(nn.Module):
    """An 8-bit layer for oneDNN.

    Args:
        linear: The layer to replace.
        weight: See `QuantizedWeights`.
        scale: See `QuantizedWeights`.
        row_sums: See `QuantizedWeights`.
        factors: See `QuantizedWeights`.
    """

    weight: Tensor
    scale: Tensor
    factors: Tensor
    row_sums: Tensor
    zero_points: Tensor
    bias: Tensor | None

    def __init__(
        self, linear: nn.Linear, weight: Tensor, scale: Tensor, row_sums: Tensor, factors: Tensor
    ) -> None:
        super().__init__()
        bias: Tensor | None = linear.bias  # may be None, although torch declares a tensor
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("factors", factors)
        self.register_buffer("row_sums", row_sums)
        self.register_buffer("zero_points", torch.zeros(len(scale), dtype=torch.int32))
        self.register_buffer("bias", None if bias is None else bias.detach().float())
        # With 7-bit activations, two products with 8-bit weights fit into 16 bits.
        self._most = 127 if onednn_int8_saturates() else 255
        self._packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., out_features]`, of the same dtype."""
        rows = x.reshape(-1, x.shape[-1]).float()
        quantized, step, zero = round_rows(rows * self.factors, self._most)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(quantized.to(torch.uint8), 1.0, 0, self._pack(), self.scale, self.zero_points),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
        out = (product - zero * self.row_sums) * step
        if self.bias is not None:
            out = out + self.bias
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)

    def _pack(self) -> Tensor:
        """Return the weights in oneDNN's layout."""
        if self._packed is None:
            self._packed = torch.ops.onednn.qlinear_prepack(self.weight, None)
        return self._packed


define_operator(
    "packed_linear_int8(Tensor x, int outputs, Tensor panels, Tensor bias, Tensor factors,"
    f" Tensor scales, Tensor row_sums, {FUSED}) -> Tensor",
)
SCHEME = Int8()
