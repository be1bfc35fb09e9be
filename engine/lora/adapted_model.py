"""Makes the linear layers of a loaded model apply adapters.

Packed layers add the low-rank products in their kernels: each has a number that selects its
matrices among the step's adapters. Layers that are not packed have a hook that adds the products to
the outputs. Fused and packed layers keep their names, so this module finds them by name. A part of
a fused layer has its own slice of the outputs.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.lora.targets import Targets
from octavo.engine.models.empty_model import make_empty
from octavo.engine.models.forward import EagerForward
from octavo.engine.models.linear.adapted_layers import Placement, Target, add_adapters
from octavo.engine.models.linear.fuse_linears import FusedPart
from octavo.engine.models.linear.packed_linear import GatedMLP, PackedLayer
from octavo.engine.models.quantization.formats import find_format
from octavo.engine.models.read_weights import read_config
from octavo.engine.models.sharding.plan import make_plan
from octavo.engine.models.sharding.sharded_layers import SummedLinear
from octavo.engine.models.sharding.shards import part_of
from octavo.engine.parallel.collectives import stages_apart
from octavo.engine.parallel.world import World
from octavo.kernels import cpu

if TYPE_CHECKING:
    from octavo.engine.models.load_model import LoadedModel

PROBE_TOKENS, PROBE_ROWS = 3, 2
"""Numbers of tokens and of rows of logits in the run that finds layers used for every token."""


def adapt_loaded(loaded: "LoadedModel", path: str, world: World | None = None) -> Targets:
    """Make a loaded model apply LoRA adapters.

    Args:
        loaded: The model, loaded to take adapters.
        path: The model's directory.
        world: The ranks that hold it; all of them call this. Default: this process alone.

    Returns:
        The layers that adapters may adapt.
    """
    quantized = find_format(Path(path)) is not None
    config = read_config(path, quantized=quantized, text_alone=world is not None)
    return adapt(loaded.model, config, loaded.dtype, world)


def adapt(
    model: PreTrainedModel,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    world: World | None = None,
) -> Targets:
    """Make a loaded model's linear layers apply LoRA adapters; see `applying`.

    It skips layers that the model does not call for every token, such as experts, and layers whose
    weights were merged into others.

    Args:
        model: The model as it runs, fused and packed; changed in place.
        config: The model's config, which gives its layers' names and sizes.
        dtype: Type of the activations.
        world: See `adapt_loaded`.

    Returns:
        The layers that adapters may adapt.
    """
    targets = linear_layers(make_empty(config, dtype), world)
    located = {
        name: _Located(target, *location)
        for name, target in targets.items()
        if (location := _find(model, name)) is not None
    }
    calls = _CountedCalls()
    token_ids = torch.zeros((1, PROBE_TOKENS), dtype=torch.int64, device=model.device)
    with torch.inference_mode(), attending(DryRun()), stages_apart(), calls.counting(located):
        EagerForward(model)(token_ids, token_ids, torch.arange(PROBE_ROWS, device=model.device))
    adaptable = {name: layer for name, layer in located.items() if calls.is_adaptable(name)}
    placing = _Placing()
    layers = {name: placing.place(layer) for name, layer in adaptable.items()}
    pinned = model.device.type == "cuda"
    elsewhere = {} if world is None else _elsewhere(targets, adaptable, world)
    return Targets(layers, dtype, pinned=pinned, orders=tuple(placing.orders), elsewhere=elsewhere)


def linear_layers(model: PreTrainedModel, world: World | None = None) -> dict[str, Target]:
    """Return the linear layers of transformers' unchanged model, or this rank's parts, by name."""
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    plan = None
    if world is not None and world.size > 1:
        plan = make_plan(model.config, world.size)
    targets: dict[str, Target] = {}
    for name, layer in model.named_modules():
        if type(layer) is nn.Linear:
            sizes = layer.in_features, layer.out_features
        elif isinstance(layer, Conv1D):
            sizes = layer.nx, layer.nf
        else:
            continue
        part = None
        if plan is not None and world is not None:
            part = part_of(model, name, sizes, plan, world)
            sizes = len(part.inputs), len(part.outputs)
        targets[name] = Target(len(targets), *sizes, is_head=layer is head, part=part)
    return targets


def _elsewhere(
    targets: Mapping[str, Target], own: Collection[str], world: World
) -> dict[str, Target]:
    """Return the layers that adapters may adapt in other stages only."""
    of_ranks = world.tell_all(*(int(name in own) for name in targets))
    somewhere = map(any, zip(*of_ranks, strict=True))
    pairs = zip(targets.items(), somewhere, strict=True)
    return {name: target for (name, target), is_there in pairs if is_there and name not in own}


@dataclass(frozen=True, slots=True)
class _Located:
    """A linear layer of the running model.

    Attributes:
        target: The layer.
        module: The module that computes it, maybe with other layers.
        half: Its half of a SwiGLU's panels, 0 or 1; None if it has whole panels.
    """

    target: Target
    module: nn.Module
    half: int | None = None

    @property
    def packed(self) -> PackedLayer | None:
        """The packed layer that computes it, if any."""
        module = self.module.shared.layer if isinstance(self.module, FusedPart) else self.module
        return module if isinstance(module, PackedLayer) else None

    @property
    def start(self) -> int:
        """Index of its first output in the packed layer."""
        return self.module.start if isinstance(self.module, FusedPart) else 0


@dataclass(slots=True)
class _CountedCalls:
    """Counts each layer's calls, and its calls with all rows."""

    all: Counter[str] = field(default_factory=Counter)
    whole: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def counting(self, located: dict[str, _Located]) -> Iterator[None]:
        """Count within."""
        hooks = [
            layer.module.register_forward_hook(partial(self._count, name, layer))
            for name, layer in located.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _count(
        self, name: str, located: _Located, _: nn.Module, inputs: tuple[Tensor, ...], out: Tensor
    ) -> None:
        target, x = located.target, inputs[0]
        self.all[name] += 1
        rows = PROBE_ROWS if target.is_head else PROBE_TOKENS
        fits = x.shape[-1] == target.inputs and out.shape[-1] == target.outputs
        if fits and x.numel() == rows * target.inputs and out.numel() == rows * target.outputs:
            self.whole[name] += 1

    def is_adaptable(self, name: str) -> bool:
        """Return whether a layer was called, always with all rows."""
        return 0 < self.all[name] == self.whole[name]


class _Placing:
    """Makes layers apply adapters.

    Attributes:
        orders: The input orders of the packed layers placed so far.
    """

    def __init__(self) -> None:
        self.orders: list[tuple[int, ...]] = []
        self._numbers: dict[PackedLayer, tuple[int, int]] = {}

    def place(self, located: _Located) -> Target:
        """Make a layer apply adapters; return it with its placement."""
        packed, target = located.packed, located.target
        if packed is None:
            located.module.register_forward_hook(_hook(target))
            return target
        assert cpu.linear is not None
        panel = cpu.linear.panel
        number, order = self._number(packed)
        if located.half is not None:
            lanes = panel // 2
            placement = Placement(number, 0, located.half * lanes, lanes, order=order)
        else:
            first, shift = divmod(located.start, panel)
            placement = Placement(number, first, 0, panel, shift, order)
        return replace(target, placement=placement)

    def _number(self, packed: PackedLayer) -> tuple[int, int]:
        """Return the numbers of a packed layer and of its input order."""
        if packed not in self._numbers:
            number, order = len(self._numbers), -1
            if packed.order is not None:
                order = len(self.orders)
                self.orders.append(tuple(packed.order.tolist()))
            packed.adapted = number
            self._numbers[packed] = number, order
        return self._numbers[packed]


def _find(model: nn.Module, name: str) -> tuple[nn.Module, int | None] | None:
    """Return the module that computes a layer, and the layer's half; None if none does."""
    owner: Any = model
    *parents, last = name.split(".")
    for parent in parents:
        owner = _child(owner, parent)
    if isinstance(owner, GatedMLP) and last in {"gate_proj", "up_proj"}:
        return owner.gated, int(last == "up_proj")
    module = _child(owner, last)
    if isinstance(module, SummedLinear):
        module = module.linear
    return (module, None) if isinstance(module, nn.Module) else None


def _child(owner: object, name: str) -> object:
    """Return the submodule of a name, also from a replaced SwiGLU; None if there is none."""
    if isinstance(owner, GatedMLP) and name == "down_proj":
        owner = owner.mlp
    return getattr(owner, name, None)


def _hook(target: Target) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
    def add(_: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return add_adapters(target, inputs[0], out)

    return add
