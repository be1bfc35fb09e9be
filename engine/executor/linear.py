"""Linear layers on CPU, packed for the kernels of `kernels.cpu.linear`.

Layers of one input, such as Q, K and V, become one, which is computed once.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.library import Library, register_fake
from transformers import PreTrainedModel

from engine.executor.paged_attention import ShapeProbe, attending
from kernels.cpu import linear as kernels
from kernels.cpu.linear import pad_outputs


class PackedLinear(nn.Module):
    """A bfloat16 linear layer with packed weights.

    Args:
        linear: the layer that it replaces.
        wide: return float32, as logits are best: of SmolLM2, whose greatest are some 25,
            bfloat16 makes equals of those less than an eighth apart.
    """

    panels: Tensor
    bias: Tensor

    def __init__(self, linear: nn.Linear, *, wide: bool = False) -> None:
        super().__init__()
        assert kernels is not None
        self.outputs = linear.out_features
        self.wide = wide
        self.register_buffer("panels", kernels.pack(linear.weight.detach()))
        self.register_buffer("bias", padded_bias(linear))

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., in_features]` to `[..., out_features]`, of the same dtype or float32."""
        rows = x.reshape(-1, x.shape[-1])
        operators = torch.ops.octavo
        multiply = operators.packed_linear_wide if self.wide else operators.packed_linear
        out: Tensor = multiply(rows, self.panels, self.bias, self.outputs)
        return out.reshape(*x.shape[:-1], -1)


def padded_bias(linear: nn.Linear) -> Tensor:
    """A layer's bias in float32, padded to whole panels; zeros where it has none."""
    bias: Tensor | None = linear.bias  # declared as always there, and often is not
    given = torch.zeros(linear.out_features) if bias is None else bias.detach().float()
    return pad_outputs(given)


def pack_linears(model: PreTrainedModel) -> None:
    """Replaces a model's linear layers, where the kernels are for this CPU and their dtype.

    Args:
        model: on CPU; changed in place.
    """
    if kernels is None:
        return
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    for group in linears_by_input(model):
        if kernels.takes(group[0].layer.in_features, group[0].layer.weight.dtype):
            wide = group[0].layer is head
            replace(group, partial(PackedLinear, wide=wide))


class Place(NamedTuple):
    """A linear layer and where it is.

    Attributes:
        parent: the module it is in.
        name: there.
        path: its name in the model.
        layer: itself.
    """

    parent: nn.Module
    name: str
    path: str
    layer: nn.Linear


@torch.inference_mode()
def linears_by_input(model: PreTrainedModel) -> list[list[Place]]:
    """Groups a model's linear layers: those of a group are given one and the same tensor.

    Experts that one token does not reach, and whatever else the model does not call, are
    left out.
    """
    inputs: dict[nn.Module, Tensor] = {}  # held, so that none takes another's place
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given: inputs.update({layer: given[0]}))
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    ]
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with attending(ShapeProbe({})):
        model(input_ids=token, position_ids=token, use_cache=False)
    for hook in hooks:
        hook.remove()
    groups: dict[tuple[int, int, bool], list[Place]] = {}
    for path, parent in model.named_modules():
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear) and layer in inputs:
                key = (id(parent), id(inputs[layer]), layer.bias is None)
                place = Place(parent, name, f"{path}.{name}".lstrip("."), layer)
                groups.setdefault(key, []).append(place)
    return list(groups.values())


def replace(group: list[Place], make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replaces layers of one input by what `make` makes of them joined."""
    if len(group) == 1:
        setattr(group[0].parent, group[0].name, make(group[0].layer))
        return
    layers = [place.layer for place in group]
    whole = Shared(make(_join(layers)), len(group))
    start = 0
    for place in group:
        width = place.layer.out_features
        setattr(place.parent, place.name, Part(whole, start, width))
        start += width


def _join(layers: list[nn.Linear]) -> nn.Linear:
    """One layer with the outputs of all, in their order."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    joined.weight = nn.Parameter(weight, requires_grad=False)
    if layers[0].bias is not None:
        bias = torch.cat([layer.bias.detach() for layer in layers])
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return joined


class Shared(nn.Module):
    """A layer that several parts ask for the same outputs: it computes them once.

    Args:
        layer: that layer.
        parts: how many there are.
    """

    def __init__(self, layer: nn.Module, parts: int) -> None:
        super().__init__()
        self.layer = layer
        self._parts = parts
        self._left = 0
        self._latest: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """The layer's outputs for x; remembered until each part has asked."""
        if self._latest is None or self._latest[0] is not x:
            self._latest = (x, self.layer(x))
            self._left = self._parts
        outputs = self._latest[1]
        self._left -= 1
        if not self._left:
            self._latest = None
        return outputs


class Part(nn.Module):
    """One layer's share of the outputs of several that have the same input.

    Args:
        whole: the layers joined.
        start: the first output of this one.
        width: how many it has.
    """

    def __init__(self, whole: Shared, start: int, width: int) -> None:
        super().__init__()
        self.whole = whole
        self.start = start
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., in_features]` to `[..., width]`, of the same dtype."""
        outputs: Tensor = self.whole(x)
        return outputs.narrow(-1, self.start, self.width)


# The operators, which the compiler calls by C shims of the same names; see aoti.cpp.

_library = Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(
    schema: str, kernel: Callable[..., Tensor] | None, dtype: torch.dtype | None = None
) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    if kernel is not None:
        _library.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    register_fake(
        f"octavo::{name}", lambda x, *rest: x.new_empty(x.shape[0], rest[-1], dtype=dtype)
    )


_define(
    "packed_linear(Tensor x, Tensor panels, Tensor bias, int outputs) -> Tensor",
    None if kernels is None else kernels.linear,
)
_define(
    "packed_linear_wide(Tensor x, Tensor panels, Tensor bias, int outputs) -> Tensor",
    None if kernels is None else kernels.linear_wide,
    torch.float32,
)
_define(
    "packed_linear_int8(Tensor x, Tensor panels, Tensor factors, Tensor scales,"
    " Tensor row_sums, Tensor bias, int outputs) -> Tensor",
    None if kernels is None else kernels.linear_int8,
)
_define(
    "packed_linear_int4(Tensor x, Tensor nibbles, Tensor panels, Tensor factors, Tensor scales,"
    " Tensor row_sums, Tensor bias, int outputs) -> Tensor",
    None if kernels is None else kernels.linear_int4,
)
