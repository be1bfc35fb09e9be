"""Linear layers on a CPU, packed for the kernels of `octavo.kernels.cpu.linear`.

Layers of the same input are fused. One kernel computes the gated product of a SwiGLU's gate and up
projections.
"""

from collections.abc import Callable
from copy import copy
from functools import partial

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.functional import silu
from transformers import PreTrainedModel

from octavo.engine.models.deferred import present
from octavo.engine.models.linear.fuse_linears import (
    JoinLinears,
    LocatedLinear,
    fuse,
    group_linears_by_input,
    join_linears,
)
from octavo.engine.models.linear.plain_linears import make_linear
from octavo.engine.operators import define
from octavo.kernels.cpu import linear as kernels

SIZES = (24, 16)
"""Numbers of outputs and of inputs of a small layer."""


class PackedLayer(nn.Module):
    """A layer of packed weights.

    Args:
        linear: The layer to replace.

    Attributes:
        outputs: The number of outputs.
        gated: Whether the weights are a SwiGLU's, from `LinearKernels.interleave`.
        adapted: Its number among adapted layers; -1 if it is not adapted.
    """

    bias: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.outputs = linear.out_features
        self.gated = False
        self.adapted = -1
        self.weight = torch.empty(0, dtype=linear.weight.dtype)  # some models read its dtype
        self.register_buffer("bias", padded_bias(linear))

    def gate(self, outputs: int) -> None:
        """Treat every other half panel as gates, with this number of outputs."""
        self.outputs, self.gated = outputs, True

    @property
    def stages(self) -> tuple[int, int]:
        """The operators' arguments `gated` and `adapted`."""
        return int(self.gated), self.adapted

    @property
    def order(self) -> Tensor | None:
        """`[inputs]` int64, the input of each column of the weights; None if they are in order."""
        return None

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., outputs]`, of the same dtype or float32."""
        return self.multiply(x.reshape(-1, x.shape[-1])).reshape(*x.shape[:-1], -1)

    def multiply(self, rows: Tensor) -> Tensor:
        """Map `[rows, in_features]` to `[rows, outputs]`."""
        raise NotImplementedError


class PackedLinear(PackedLayer):
    """A bfloat16 or float32 linear layer with packed weights.

    Args:
        linear: The layer to replace.
        wide: Whether to return float32 also for bfloat16, as logits need; see `wide_linear.py`.
    """

    panels: Tensor

    def __init__(self, linear: nn.Linear, *, wide: bool = False) -> None:
        super().__init__(linear)
        assert kernels is not None
        self.wide = wide and linear.weight.dtype != torch.float32
        self.register_buffer("panels", kernels.pack(present(linear.weight.detach())))

    def multiply(self, rows: Tensor) -> Tensor:
        """Map `[rows, in_features]` to `[rows, outputs]`."""
        arguments = (rows, self.outputs, self.panels, self.bias)
        out: Tensor = (
            torch.ops.octavo.packed_linear_wide(*arguments, self.adapted)
            if self.wide
            else torch.ops.octavo.packed_linear(*arguments, *self.stages)
        )
        return out


def has_kernels(layer: nn.Linear) -> bool:
    """Return whether this CPU has kernels for a layer."""
    return kernels is not None and kernels.takes(layer.in_features, layer.weight.dtype)


def has_quantized_kernels(layer: nn.Linear) -> bool:
    """Return whether this CPU has kernels for a layer's quantized weights, with bfloat16 rows."""
    return layer.weight.dtype == torch.bfloat16 and has_kernels(layer)


def _can_gate(layer: nn.Linear) -> bool:
    """Return whether a layer's kernels can gate its outputs, for any type of packed weights."""
    return kernels is not None and layer.weight.dtype in {torch.bfloat16, torch.float32}


def padded_bias(linear: nn.Linear) -> Tensor:
    """Return a layer's bias in float32, padded to whole panels; zeros if it has none."""
    bias: Tensor | None = linear.bias  # may be None, although torch declares a tensor
    values = torch.zeros(linear.out_features) if bias is None else bias.detach().float()
    assert kernels is not None
    return kernels.pad_outputs(values)


def pack_linears(model: PreTrainedModel) -> None:
    """Replace a model's linear layers if this CPU has kernels for them.

    Args:
        model: A model on a CPU; changed in place.
    """
    if kernels is None:
        return
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    groups = group_linears_by_input(model)
    while groups:
        group = groups.pop()  # frees each once replaced
        if has_kernels(group[0].layer):
            replace(model, group, partial(PackedLinear, wide=group[0].layer is head))


def replace(
    model: PreTrainedModel,
    group: list[LocatedLinear],
    convert: Callable[[nn.Linear], nn.Module],
    join: JoinLinears = join_linears,
    *,
    gates: bool = True,
) -> None:
    """Fuse layers of the same input and replace them by the result of `convert`.

    Args:
        model: The layers' model.
        group: The layers.
        convert: Must return a `PackedLayer` for a layer that has kernels.
        join: Builds a fused layer, as `join_linears` does.
        gates: Whether `convert` returns layers that can gate their outputs.
    """
    first = group[0]
    if len(group) == 1:
        setattr(first.parent, first.name, convert(first.layer))
        return
    if gates and _can_gate(first.layer) and _are_swiglu(group):
        gate, up = (located.layer for located in group)
        assert kernels is not None
        interleave = kernels.interleave
        packed = convert(join([gate, up], lambda pair: interleave(*pair)))
        assert isinstance(packed, PackedLayer)
        packed.gate(gate.out_features)
        owner, _, name = first.path.rpartition(".")[0].rpartition(".")
        setattr(model.get_submodule(owner), name, GatedMLP(packed, first.parent))
        return
    fuse(group, convert, join)


@torch.inference_mode()
def _are_swiglu(group: list[LocatedLinear]) -> bool:
    """Return whether layers are the gate and up projections of an MLP that computes a SwiGLU."""
    mlp = group[0].parent
    names = [located.name for located in group]
    if names != ["gate_proj", "up_proj"] or {name for name, _ in mlp.named_children()} != {
        *(*names, "down_proj", "act_fn"),
    }:
        return False
    generator = torch.Generator().manual_seed(0)
    small = copy(mlp)  # a small copy with the same code
    small._modules = dict(mlp._modules)  # noqa: SLF001 - a separate dict
    for name, sizes in (("gate_proj", SIZES), ("up_proj", SIZES), ("down_proj", SIZES[::-1])):
        small._modules[name] = make_linear(torch.randn(sizes, generator=generator))  # noqa: SLF001
    x = torch.randn((1, 8, SIZES[1]), generator=generator)
    gate, up, down = (small.get_submodule(name) for name in (*names, "down_proj"))
    try:
        return torch.allclose(small(x), down(silu(gate(x)) * up(x)))
    except RuntimeError:  # its code depends on its sizes
        return False


class GatedMLP(nn.Module):
    """A SwiGLU whose gate and up projections are one layer.

    Args:
        gated: The layer that returns their product.
        mlp: The module to replace, for its `down_proj`.
    """

    def __init__(self, gated: PackedLayer, mlp: nn.Module) -> None:
        super().__init__()
        self.gated = gated
        self.mlp = mlp
        del mlp.gate_proj, mlp.up_proj, mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden]` to `[..., hidden]`."""
        out: Tensor = self.mlp.get_submodule("down_proj")(self.gated(x))
        return out


OPERATORS: list[OpOverload] = []
"""The operators of packed layers."""
ADAPTED = "int adapted"
NORMED = "Tensor? norm=None, float epsilon=0.0, Tensor? residual=None"
"""The last arguments of operators into which `fusion.py` can fuse a norm and a residual, after
`gated`."""
FUSED = f"int gated, {ADAPTED}, {NORMED}"
"""The last arguments of such operators that also take adapters."""


def define_operator(schema: str, dtype: torch.dtype | None = None) -> None:
    """Define a packed layer's operator.

    Args:
        schema: Its name and arguments; the first two are the rows and the number of outputs.
        dtype: The outputs' dtype, if not the rows'.
    """
    operator = define(
        schema,
        lambda x, outputs, *_, **__: x.new_empty(x.shape[0], outputs, dtype=dtype),
        native=True,
    )
    OPERATORS.append(operator)


define_operator(
    f"packed_linear(Tensor x, int outputs, Tensor panels, Tensor bias, {FUSED}) -> Tensor"
)
define_operator(
    f"packed_linear_wide(Tensor x, int outputs, Tensor panels, Tensor bias, {ADAPTED}) -> Tensor",
    torch.float32,
)
