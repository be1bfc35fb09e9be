"""Linear layers with quantized weights on a GPU.

Each is an operator, so that a compiled step calls its kernel.
"""

import torch
from torch import Tensor, nn

from octavo.engine.models.linear.fuse_linears import weights_and_biases
from octavo.engine.operators import define
from octavo.kernels import ops
from octavo.kernels.quantized import SCALE_TYPES, Numbers, QuantizedWeight, Second


class QuantizedLinear(nn.Module):
    """A layer whose kernel unpacks its weights; inputs stay in 16 bits.

    Args:
        weight: Its weights.
        bias: `[outputs]`, if any.
        wide: Whether to return float32, which logits need; see `wide_linear.py`.
        order: `[inputs]` int64, the input of each column of the weights; None: they are in order.
    """

    codes: Tensor
    scale: Tensor
    more: Tensor | None
    outer: Tensor | None
    order: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        weight: QuantizedWeight,
        bias: Tensor | None,
        *,
        wide: bool = False,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.wide = wide
        self.num_weights = weight.outputs * weight.inputs
        self._layout = layout_of(weight)
        for name in ("codes", "scale", "more", "outer"):
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("bias", bias)
        self.register_buffer("order", order)

    @property
    def quantized(self) -> QuantizedWeight:
        """Its weights, on the layer's device."""
        return weight_of(self.codes, self.scale, self.more, self.outer, self._layout)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., inputs]` to `[..., outputs]`, of the same dtype or float32."""
        rows = x.reshape(-1, x.shape[-1])
        if self.order is not None:
            rows = rows.index_select(1, self.order)
        out: Tensor = torch.ops.octavo.quantized_linear(
            *(rows, self.codes, self.scale, self.more, self.outer, self.bias),
            *(self._layout, int(self.wide)),
        )
        return out.reshape(*x.shape[:-1], -1)


class Fp8Linear(nn.Module):
    """A layer that multiplies in fp8; each row of inputs is rounded.

    Args:
        codes: `[outputs, inputs]` e4m3.
        scale: `[1, outputs]` float32.
        bias: `[outputs]`, if any.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.num_weights = codes.numel()
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., inputs]` to `[..., outputs]`, of the same dtype."""
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = torch.ops.octavo.fp8_linear(rows, self.codes, self.scale, self.bias)
        return out.reshape(*x.shape[:-1], -1)


def bias_of(layers: list[nn.Linear]) -> Tensor | None:
    """Join the biases of layers of the same input; None if they have none."""
    _, *biases = weights_and_biases(*layers)
    return torch.cat(biases[0]) if biases else None


def layout_of(weight: QuantizedWeight) -> list[int]:
    """Return a weight's scalar properties as numbers for an operator."""
    numbers, second = weight.numbers.value, weight.second.value
    scales = 0 if weight.scale_type is None else 1 + SCALE_TYPES.index(weight.scale_type)
    return [weight.inputs, weight.group, numbers, weight.zero_point, second, scales]


def weight_of(
    codes: Tensor,
    scale: Tensor,
    more: Tensor | None,
    outer: Tensor | None,
    layout: list[int],
) -> QuantizedWeight:
    """Return the weight described by the result of `layout_of` and by its tensors."""
    inputs, group, numbers, zero_point, second, scales = layout
    kind = SCALE_TYPES[scales - 1] if scales else None
    properties = (Numbers(numbers), zero_point, Second(second), kind)
    return QuantizedWeight(codes, scale, inputs, group, *properties, more, outer)


def _quantized_linear(  # noqa: PLR0917 - as the operator
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    more: Tensor | None,
    outer: Tensor | None,
    bias: Tensor | None,
    layout: list[int],
    wide: int,
) -> Tensor:
    dtype = torch.float32 if wide else None
    return ops.quantized_linear(x, weight_of(codes, scale, more, outer, layout), bias, dtype)


def _fp8_linear(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return ops.fp8_linear(x, codes, scale, bias)


define(
    "quantized_linear(Tensor x, Tensor codes, Tensor scale, Tensor? more, Tensor? outer,"
    " Tensor? bias, int[] layout, int wide) -> Tensor",
    lambda x, codes, *rest: x.new_empty(
        x.shape[0], codes.shape[0], dtype=torch.float32 if rest[-1] else x.dtype
    ),
    CUDA=_quantized_linear,
    CPU=_quantized_linear,  # for tests only
)
define(
    "fp8_linear(Tensor x, Tensor codes, Tensor scale, Tensor? bias) -> Tensor",
    lambda x, codes, *_: x.new_empty(x.shape[0], codes.shape[0]),
    CUDA=_fp8_linear,
    CPU=_fp8_linear,  # for tests only
)
