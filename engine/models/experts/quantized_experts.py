"""Expert layers with quantized weights on a GPU.

Each is an operator, so that a compiled step calls its kernels.
"""

import torch
from torch import Tensor, nn

from octavo.engine.models.experts.expert_layer import ExpertLayer
from octavo.engine.models.experts.grouped_experts import activation_of
from octavo.engine.models.linear.quantized_linear import layout_of, weight_of
from octavo.engine.operators import define
from octavo.kernels import ops
from octavo.kernels.quantized import QuantizedWeight

TENSORS = ("codes", "scale", "more", "outer")
"""The tensors of a `QuantizedWeight`."""


class QuantizedExperts(nn.Module):
    """All experts of a layer; the kernels unpack their weights, and inputs are not rounded.

    Args:
        layer: The layer to replace, for its activation and biases.
        up: The first product's weights, `[experts * projected, hidden]`, gates first.
        down: The second product's weights, `[experts * hidden, inner]`.
    """

    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(self, layer: ExpertLayer, up: QuantizedWeight, down: QuantizedWeight) -> None:
        super().__init__()
        self.num_weights = layer.elements
        self._activation = layer.activation
        self._layouts = {"up": layout_of(up), "down": layout_of(down)}
        for product, weight in (("up", up), ("down", down)):
            for name in TENSORS:
                self.register_buffer(f"{product}_{name}", getattr(weight, name))
        self.register_buffer("up_bias", layer.up_biases())
        self.register_buffer("down_bias", layer.down_biases())

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute each token's experts; see `interface.py`."""
        out: Tensor = torch.ops.octavo.quantized_experts(
            *(hidden_states, top_k_index, top_k_weights.float()),
            *(*self._tensors("up"), self._layouts["up"], self.up_bias),
            *(*self._tensors("down"), self._layouts["down"], self.down_bias),
            *self._activation.arguments,
        )
        return out

    def _tensors(self, product: str) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        codes, scale, more, outer = (getattr(self, f"{product}_{name}") for name in TENSORS)
        return codes, scale, more, outer


def _quantized_experts(  # noqa: PLR0917 - as the operator
    x: Tensor,
    expert_ids: Tensor,
    weights: Tensor,
    up: Tensor,
    up_scale: Tensor,
    up_more: Tensor | None,
    up_outer: Tensor | None,
    up_layout: list[int],
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor,
    down_more: Tensor | None,
    down_outer: Tensor | None,
    down_layout: list[int],
    down_bias: Tensor | None,
    *activation: float,
) -> Tensor:
    first = weight_of(up, up_scale, up_more, up_outer, up_layout)
    second = weight_of(down, down_scale, down_more, down_outer, down_layout)
    return ops.quantized_experts(
        *(x, expert_ids, weights, first, up_bias, second, down_bias, activation_of(*activation))
    )


_WEIGHT = "Tensor {0}, Tensor {0}_scale, Tensor? {0}_more, Tensor? {0}_outer, int[] {0}_layout"
define(
    "quantized_experts(Tensor x, Tensor expert_ids, Tensor weights,"
    f" {_WEIGHT.format('up')}, Tensor? up_bias, {_WEIGHT.format('down')}, Tensor? down_bias,"
    " int activation, int gated, float alpha, float limit, float offset) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    CUDA=_quantized_experts,
    CPU=_quantized_experts,  # for tests only
)
