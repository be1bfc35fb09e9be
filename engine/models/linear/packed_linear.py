"""Linear layers on CPU, packed for the kernels of `octavo.kernels.cpu.linear`.

Layers of one input become one (see `joining`); of a SwiGLU's gate and what it gates, the
product itself does.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.library import Library, register_fake
from torch.nn.functional import silu
from transformers import PreTrainedModel

from octavo.engine.models.linear.fuse_linears import (
    Place,
    as_linear,
    join,
    linears_by_input,
    weights_and_biases,
)
from octavo.kernels.cpu import linear as kernels
from octavo.kernels.cpu.linear import interleave, pad_outputs


class PackedLayer(nn.Module):
    """A layer of packed weights.

    Args:
        linear: the layer that it replaces.

    Attributes:
        outputs: how many there are.
        gated: whether they are those of a SwiGLU, of `octavo.kernels.cpu.linear.interleave`.
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
    if has_kernels(first.layer) and _are_swiglu(group):
        gate, other = (place.layer for place in group)
        packed = make(as_linear(*(interleave(*pair) for pair in weights_and_biases(gate, other))))
        assert isinstance(packed, PackedLayer)
        packed.gate(gate.out_features)
        owner, _, name = first.path.rpartition(".")[0].rpartition(".")
        setattr(model.get_submodule(owner), name, GatedMLP(packed, first.parent))
        return
    join(group, make)


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
