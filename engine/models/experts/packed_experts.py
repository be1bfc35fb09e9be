"""Expert layers on a CPU, packed for the kernel of `octavo.kernels.cpu.experts`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.models.deferred import held
from octavo.engine.models.experts.expert_layer import ExpertLayer, find_experts
from octavo.engine.operators import define
from octavo.kernels.activation import Activation
from octavo.kernels.cpu import experts as kernels
from octavo.kernels.cpu.experts import PackedProduct, count_inputs


class PackedExperts(nn.Module):
    """All experts of a layer, with packed weights.

    Args:
        activation: Their activation.
        up: The first product of all experts.
        down: The second product of all experts.
    """

    def __init__(self, activation: Activation, up: PackedProduct, down: PackedProduct) -> None:
        super().__init__()
        self._activation = activation
        for name, packed in (("up", up), ("down", down)):
            for part, values in packed._asdict().items():
                self.register_buffer(f"{name}_{part}", values)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Compute each token's experts; see `interface.py`."""
        up, down = self._product("up"), self._product("down")
        dtype = torch.float32 if up.panels.dtype == torch.float32 else torch.bfloat16
        out: Tensor = torch.ops.octavo.packed_experts(
            *(hidden_states.to(dtype), top_k_index, top_k_weights.float()),
            *(up.panels, up.bias, down.panels, down.bias),
            *self._activation.arguments,
            *(up.factors, up.scales, down.factors, down.scales),
        )
        return out.to(hidden_states.dtype)

    @property
    def num_weights(self) -> int:
        """The number of weights, including panels' padding."""
        products = self._product("up"), self._product("down")
        return sum(product.bias.numel() * count_inputs(product.panels) for product in products)

    @property
    def is_int4(self) -> bool:
        """Whether the weights have 4 bits."""
        return self._product("up").panels.dtype == torch.uint8

    def _product(self, name: str) -> PackedProduct:
        return PackedProduct(*(getattr(self, f"{name}_{part}") for part in PackedProduct._fields))


def has_kernels(layer: ExpertLayer, dtype: torch.dtype) -> bool:
    """Return whether this CPU has a kernel for a layer.

    Args:
        layer: The layer.
        dtype: Type of the packed weights; uint8 for 4 bits.
    """
    if kernels is None or layer.dtype == torch.float16:
        return False
    return kernels.takes(layer.hidden, layer.inner, dtype)


def pack_experts(model: PreTrainedModel) -> None:
    """Pack a model's expert layers if this CPU has a kernel for them.

    Args:
        model: A model on a CPU; changed in place.
    """
    for layer in find_experts(model):
        if has_kernels(layer, layer.dtype):
            with held(layer.module):
                layer.replace(packed(layer))


def count_packed(model: nn.Module) -> int:
    """Return the number of a model's packed expert layers."""
    return sum(isinstance(module, PackedExperts) for module in model.modules())


def packed(layer: ExpertLayer) -> PackedExperts:
    """Return a layer's experts with unchanged, packed weights."""
    assert kernels is not None
    up, down = (pack_product(layer, name, kernels.linear.pack) for name in ("up", "down"))
    return PackedExperts(layer.activation, up, down)


def pack_product(layer: ExpertLayer, name: str, pack: Callable[[Tensor], Tensor]) -> PackedProduct:
    """Pack one product of all experts.

    Args:
        layer: The layer.
        name: "up" or "down".
        pack: Returns the panels of one expert's arranged weights, `[outputs, inputs]`.
    """
    weight = layer.up if name == "up" else layer.down
    bias = layer.up_bias if name == "up" else layer.down_bias
    return PackedProduct(
        stacked(layer.count, lambda expert: pack(arranged(layer, name, weight(expert)))),
        stacked(layer.count, lambda expert: padded(layer, name, bias(expert))),
    )


def arranged(layer: ExpertLayer, name: str, values: Tensor) -> Tensor:
    """Return one expert's outputs of a product in the order of its panels."""
    assert kernels is not None
    return kernels.arrange(values, gated=name == "up" and layer.activation.gated)


def padded(layer: ExpertLayer, name: str, values: Tensor) -> Tensor:
    """Return one expert's outputs of a product in that order, padded to whole panels."""
    assert kernels is not None
    return kernels.linear.pad_outputs(arranged(layer, name, values))


def stacked(count: int, make: Callable[[int], Tensor]) -> Tensor:
    """Stack a function's tensors for all experts."""
    first = make(0)
    made = first.new_empty((count, *first.shape))
    made[0] = first
    for expert in range(1, count):
        made[expert] = make(expert)
    return made


define(
    "packed_experts(Tensor x, Tensor expert_ids, Tensor weights, Tensor up, Tensor up_bias,"
    " Tensor down, Tensor down_bias, int activation, int gated, float alpha, float limit,"
    " float offset, Tensor? up_factors=None, Tensor? up_scales=None, Tensor? down_factors=None,"
    " Tensor? down_scales=None) -> Tensor",
    lambda x, *_: x.new_empty(x.shape),
    native=True,
)
