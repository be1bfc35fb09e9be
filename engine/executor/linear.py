"""Linear layers on CPU, packed for the kernels of `kernels.cpu.linear`.

Layers of one input, such as Q, K and V, become one, which is computed once; of a SwiGLU's
gate and what it gates, the product itself does.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.library import Library, register_fake
from torch.nn.functional import silu
from transformers import PreTrainedModel

from engine.executor.paged_attention import ShapeProbe, attending
from kernels.cpu import linear as kernels
from kernels.cpu.linear import interleave, pad_outputs


class PackedLayer(nn.Module):
    """A layer of packed weights.

    Args:
        linear: the layer that it replaces.

    Attributes:
        outputs: how many there are.
        gated: whether they are those of a SwiGLU, of `kernels.cpu.linear.interleave`.
    """

    bias: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs = linear.out_features
        self.gated = False
        self.register_buffer("bias", padded_bias(linear))

    def gate(self, outputs: int) -> None:
        """Takes every other half panel for a gate's, of so many outputs."""
        self.outputs, self.gated = outputs, True

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., in_features]` to `[..., outputs]`, of the same dtype or float32."""
        return self.multiply(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    def multiply(self, rows: Tensor) -> Tensor:
        """Maps `[rows, in_features]` to `[rows, outputs]`."""
        raise NotImplementedError


class PackedLinear(PackedLayer):
    """A bfloat16 linear layer with packed weights.

    Args:
        linear: the layer that it replaces.
        wide: return float32, as logits are best: of SmolLM2, whose greatest are some 25,
            bfloat16 makes equals of those less than an eighth apart.
    """

    panels: Tensor

    def __init__(self, linear: nn.Linear, *, wide: bool = False) -> None:
        super().__init__(linear)
        assert kernels is not None
        self.wide = wide
        self.register_buffer("panels", kernels.pack(linear.weight.detach()))

    def multiply(self, rows: Tensor) -> Tensor:
        """Maps `[rows, in_features]` to `[rows, outputs]`."""
        given = (rows, self.outputs, self.panels, self.bias)
        operators = torch.ops.octavo
        out: Tensor = (
            operators.packed_linear_wide(*given)
            if self.wide
            else operators.packed_linear(*given, int(self.gated))
        )
        return out


def has_kernels(layer: nn.Linear) -> bool:
    """Whether there are kernels for a layer, for this CPU, in bfloat16 and fewer bits."""
    dtype = layer.weight.dtype
    return (
        kernels is not None and dtype == torch.bfloat16 and kernels.takes(layer.in_features, dtype)
    )


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
        if has_kernels(group[0].layer):
            replace(model, group, partial(PackedLinear, wide=group[0].layer is head))


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


def replace(
    model: PreTrainedModel, group: list[Place], make: Callable[[nn.Linear], nn.Module]
) -> None:
    """Replaces layers of one input by what `make` makes of them joined.

    Args:
        model: theirs.
        group: the layers.
        make: gives a `PackedLayer` of a layer that there are kernels for.
    """
    first = group[0]
    if len(group) == 1:
        setattr(first.parent, first.name, make(first.layer))
        return
    layers = [place.layer for place in group]
    if has_kernels(first.layer) and _are_swiglu(group):
        gate, other = layers
        packed = make(_linear(*(interleave(*pair) for pair in _weights_and_biases(gate, other))))
        assert isinstance(packed, PackedLayer)
        packed.gate(gate.out_features)
        owner, _, name = first.path.rpartition(".")[0].rpartition(".")
        setattr(model.get_submodule(owner), name, GatedMLP(packed, first.parent))
        return
    whole = Shared(make(_linear(*map(torch.cat, _weights_and_biases(*layers)))), len(group))
    start = 0
    for place in group:
        width = place.layer.out_features
        setattr(place.parent, place.name, Part(whole, start, width))
        start += width


@torch.inference_mode()
def _are_swiglu(group: list[Place]) -> bool:
    """Whether layers are both of an MLP's that is nothing but a SwiGLU: by what it computes."""
    mlp, gate = group[0].parent, group[0].layer
    names = [place.name for place in group]
    if names != ["gate_proj", "up_proj"] or {name for name, _ in mlp.named_children()} != {
        *(*names, "down_proj", "act_fn"),
    }:
        return False
    down: nn.Module = mlp.get_submodule("down_proj")
    x = torch.randn(
        (1, 8, gate.in_features),
        generator=torch.Generator().manual_seed(0),
        dtype=gate.weight.dtype,
    )
    expected = down(silu(gate(x)) * group[1].layer(x))
    return torch.allclose(mlp(x), expected)


class GatedMLP(nn.Module):
    """A SwiGLU whose gate is computed with what it gates.

    Args:
        gated: gives both multiplied.
        mlp: what this takes the place of, for its `down_proj`.
    """

    def __init__(self, gated: PackedLayer, mlp: nn.Module) -> None:
        super().__init__()
        self.gated = gated
        self.mlp = mlp
        del mlp.gate_proj, mlp.up_proj, mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[..., hidden]` to the same."""
        out: Tensor = self.mlp.get_submodule("down_proj")(self.gated(x))
        return out


def _weights_and_biases(*layers: nn.Linear) -> Iterator[list[Tensor]]:
    """Gives the layers' weights, and then their biases if they have any."""
    yield [layer.weight.detach() for layer in layers]
    if layers[0].bias is not None:
        yield [layer.bias.detach() for layer in layers]


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer of that weight, `[outputs, inputs]`, and bias."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


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


_FUSED = "int gated, Tensor? norm=None, float epsilon=0.0, Tensor? residual=None"


def _define(
    schema: str, kernel: Callable[..., Tensor] | None, dtype: torch.dtype | None = None
) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    if kernel is not None:
        _library.impl(name, kernel, "CPU")  # type: ignore[no-untyped-call]
    register_fake(
        f"octavo::{name}",
        lambda x, outputs, *_, **__: x.new_empty(x.shape[0], outputs, dtype=dtype),
    )


_define(
    f"packed_linear(Tensor x, int outputs, Tensor panels, Tensor bias, {_FUSED}) -> Tensor",
    None if kernels is None else kernels.linear,
)
_define(
    "packed_linear_wide(Tensor x, int outputs, Tensor panels, Tensor bias) -> Tensor",
    None if kernels is None else kernels.linear_wide,
    torch.float32,
)
_define(
    "packed_linear_int8(Tensor x, int outputs, Tensor panels, Tensor bias, Tensor factors,"
    f" Tensor scales, Tensor row_sums, {_FUSED}) -> Tensor",
    None if kernels is None else kernels.linear_int8,
)
_define(
    "packed_linear_int4(Tensor x, int outputs, Tensor panels, Tensor bias, Tensor factors,"
    f" Tensor scales, Tensor row_sums, Tensor nibbles, {_FUSED}) -> Tensor",
    None if kernels is None else kernels.linear_int4,
)
