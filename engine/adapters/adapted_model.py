"""Lets the linear layers of a loaded model take adapters.

A hook on each layer adds the products of low rank to its outputs. Layers keep their names when
they are fused or packed, so that a hook finds them: a part of a fused layer has its own slice of
the outputs. Only SwiGLUs whose gate and up projections are one kernel are taken apart, in steps
with adapters.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.engine.adapters.step import applying, current_adapters
from octavo.engine.adapters.targets import Target, Targets
from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.models.empty_model import make_empty
from octavo.engine.models.linear.packed_linear import GatedMLP, PackedLayer
from octavo.engine.models.step import EagerStep
from octavo.kernels import cpu

PROBE_TOKENS, PROBE_ROWS = 3, 2
"""Tokens, and rows of logits, of the run that shows which layers run for every token."""


@dataclass(frozen=True, slots=True)
class AdaptedModel:
    """A model whose layers take adapters.

    Attributes:
        step: Runs it; see `octavo.engine.adapters.step.applying`.
        targets: Its layers that adapters may adapt.
    """

    step: EagerStep
    targets: Targets


def adapt(model: PreTrainedModel, config: PreTrainedConfig, dtype: torch.dtype) -> AdaptedModel:
    """Make a loaded model's linear layers apply LoRA adapters.

    Layers that it does not call for every token, such as those of experts, are left out, as are
    layers whose weights became part of something else.

    Args:
        model: The model as it runs, fused and packed; hooks are added.
        config: The model's, from which its layers' names and sizes come.
        dtype: Of its activations.
    """
    candidates = linear_layers(make_empty(config, dtype))
    for name, target in candidates.items():
        _take_adapters(model, name, target)
    calls = _CountedCalls()
    step = EagerStep(model)
    token_ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=model.device)
    with torch.inference_mode(), attending(DryRun()), applying(calls):
        step(token_ids, token_ids, torch.arange(PROBE_ROWS, device=model.device))
    layers = {name: own for name, own in candidates.items() if calls.is_adaptable(own)}
    return AdaptedModel(step, Targets(layers, dtype, pinned=model.device.type == "cuda"))


def linear_layers(model: PreTrainedModel) -> dict[str, Target]:
    """Return the linear layers of a model as transformers makes it, by name."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    found: dict[str, Target] = {}
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear:
            sizes = layer.in_features, layer.out_features
        elif isinstance(layer, Conv1D):
            sizes = layer.nx, layer.nf
        else:
            continue
        found[name] = Target(len(found), *sizes, is_head=layer is head)
    return found


@dataclass(slots=True)
class _CountedCalls:
    """Counts the calls of each layer, and those with all of its rows."""

    all: Counter[int] = field(default_factory=Counter)
    whole: Counter[int] = field(default_factory=Counter)

    def add(self, target: Target, x: Tensor, out: Tensor) -> None:
        """Count a call; see `AdapterStep`."""
        self.all[target.index] += 1
        rows = PROBE_ROWS if target.is_head else PROBE_TOKENS
        fits = x.shape[-1] == target.inputs and out.shape[-1] == target.outputs
        if fits and x.numel() == rows * target.inputs and out.numel() == rows * target.outputs:
            self.whole[target.index] += 1

    def is_adaptable(self, target: Target) -> bool:
        """Return whether a layer was called, and always with all rows."""
        return 0 < self.all[target.index] == self.whole[target.index]


def _take_adapters(model: nn.Module, name: str, target: Target) -> None:
    """Have a layer add adapters' products, if the model still has it."""
    owner: Any = model
    *parents, last = name.split(".")
    for parent in parents:
        owner = _child(owner, parent)
    if isinstance(owner, GatedMLP) and last in {"gate_proj", "up_proj"}:
        mlp: Any = owner
        if not isinstance(mlp.gated, AdaptedGate):
            mlp.gated = AdaptedGate(mlp.gated)
        mlp.gated.targets[last] = target
    elif isinstance(layer := _child(owner, last), nn.Module):
        layer.register_forward_hook(_add_to(target))


def _child(owner: object, name: str) -> object:
    """Return what has a name in a module, also in a SwiGLU that was replaced; None if nothing."""
    if isinstance(owner, GatedMLP) and name == "down_proj":
        owner = owner.mlp
    return getattr(owner, name, None)


def _add_to(target: Target) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def add(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        if (step := current_adapters()) is not None:
            step.add(target, given[0], out)

    return add


class AdaptedGate(nn.Module):
    """The gate and up projections of a SwiGLU in one kernel, which steps with adapters take apart.

    Args:
        gated: The layer of both.

    Attributes:
        targets: The projections that adapters may adapt, by their names.
    """

    def __init__(self, gated: PackedLayer) -> None:
        super().__init__()
        self.gated = gated
        self.targets: dict[str, Target] = {}
        apart = copy.copy(gated)  # shares the weights
        apart.gated, apart.outputs = False, gated.bias.numel()
        self._apart = [apart]  # in a list, so that its weights do not count twice

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden]` to the product of gate and up projection."""
        step = current_adapters()
        if step is None:
            out: Tensor = self.gated(x)
            return out
        assert cpu.linear is not None
        halves = self._apart[0](x).reshape(*x.shape[:-1], -1, 2, cpu.linear.panel // 2)
        gate, up = (
            halves[..., part, :].flatten(-2)[..., : self.gated.outputs].contiguous()
            for part in (0, 1)
        )
        for name, projected in (("gate_proj", gate), ("up_proj", up)):
            if name in self.targets:
                step.add(self.targets[name], x, projected)
        product: Tensor = silu(gate) * up
        return product
