"""Fuses linear layers of the same input, such as Q, K and V, into one.

With few tokens, a product waits for its weights; with more tokens but few outputs, it leaves cores
or multiprocessors idle. One product of all outputs is better in both cases.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.models.empty_model import running_empty
from octavo.engine.models.linear.plain_linears import make_linear, plain_linears
from octavo.engine.models.linear.wide_linear import WideLinear


class LocatedLinear(NamedTuple):
    """A linear layer and its place in the model.

    Attributes:
        parent: The module that contains it.
        name: Its name in the parent.
        path: Its name in the model.
        layer: The layer.
    """

    parent: nn.Module
    name: str
    path: str
    layer: nn.Linear


@torch.no_grad()  # inference mode conflicts with the mode of `running_empty`
def group_linears_by_input(model: PreTrainedModel) -> list[list[LocatedLinear]]:
    """Return a model's plain linear layers, grouped by parent and input tensor.

    It skips layers that the model does not call for a single token, such as some experts.
    """
    plain = plain_linears(model)
    if not plain:
        return []
    inputs: dict[nn.Module, Tensor] = {}  # keeps the tensors alive, so that their ids differ
    hooks = [
        layer.register_forward_pre_hook(
            lambda layer, arguments: inputs.update({layer: arguments[0]})
        )
        for layer in plain
    ]
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with attending(DryRun()), running_empty():
        model(input_ids=token, position_ids=token, use_cache=False)
    for hook in hooks:
        hook.remove()
    groups: dict[tuple[int, int, bool], list[LocatedLinear]] = {}
    for path, parent in model.named_modules():
        for name, layer in parent.named_children():
            if isinstance(layer, nn.Linear) and layer in inputs:
                key = (id(parent), id(inputs[layer]), layer.bias is None)
                located = LocatedLinear(parent, name, f"{path}.{name}".lstrip("."), layer)
                groups.setdefault(key, []).append(located)
    return list(groups.values())


def join_linears(layers: list[nn.Linear], join: Callable[[list[Tensor]], Tensor]) -> nn.Linear:
    """Join layers into one with the outputs of all.

    Args:
        layers: Layers of the same input.
        join: Joins their weights, or their biases, into one tensor, in the order of the outputs.
    """
    return make_linear(*map(join, weights_and_biases(*layers)))


JoinLinears = Callable[[list[nn.Linear], Callable[[list[Tensor]], Tensor]], nn.Linear]


def fuse(
    group: list[LocatedLinear],
    convert: Callable[[nn.Linear], nn.Module],
    join: JoinLinears = join_linears,
) -> None:
    """Replace layers of the same input by parts of one layer.

    Args:
        group: The layers.
        convert: Returns the replacement of the fused layer.
        join: Builds the fused layer, as `join_linears` does.
    """
    layers = [located.layer for located in group]
    share(group, convert(join(layers, torch.cat)))


def share(group: list[LocatedLinear], layer: nn.Module) -> None:
    """Replace linear layers of the same input by parts of one layer.

    Args:
        group: The layers.
        layer: The layer with all their outputs, in order.
    """
    if len(group) == 1:
        setattr(group[0].parent, group[0].name, layer)
        return
    shared = SharedLinear(layer, len(group))
    start = 0
    for located in group:
        width = located.layer.out_features
        setattr(located.parent, located.name, FusedPart(shared, start, width))
        start += width


class Fitting(Protocol):
    """Weights that can be joined with compatible weights of other layers of the same input."""

    def fits(self, other: Any) -> bool:  # noqa: ANN401 - of the same class
        """Return whether the weights of two layers can be joined."""


Weight = TypeVar("Weight", bound=Fitting)


def split_alike(
    group: list[LocatedLinear], weights: Sequence[Weight | None]
) -> list[tuple[list[LocatedLinear], list[Weight]]]:
    """Split a group's layers into parts whose weights can be joined.

    Args:
        group: Layers of the same input.
        weights: Weights of the layers; layers with None are left out.
    """
    parts: list[tuple[list[LocatedLinear], list[Weight]]] = []
    for located, weight in zip(group, weights, strict=True):
        if weight is None:
            continue
        fitting = next((part for part in parts if part[1][0].fits(weight)), None)
        if fitting is None:
            parts.append(([located], [weight]))
        else:
            fitting[0].append(located)
            fitting[1].append(weight)
    return parts


def fuse_linears(model: PreTrainedModel) -> None:
    """Fuse a model's plain linear layers of the same input; the head returns float32.

    Args:
        model: The model; changed in place.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    groups = group_linears_by_input(model)
    while groups:
        group = groups.pop()  # frees each once replaced: memory may not hold both
        first = group[0]
        layers = [located.layer for located in group]
        if any(type(layer) is not nn.Linear for layer in layers):
            continue  # such as layers of a quantized checkpoint
        if first.layer is head:
            setattr(first.parent, first.name, WideLinear(first.layer))
        elif len(group) > 1 and len({layer.weight.dtype for layer in layers}) == 1:
            fuse(group, lambda fused: fused)


def weights_and_biases(*layers: nn.Linear) -> Iterator[list[Tensor]]:
    """Yield the layers' weights, then their biases if they have any."""
    yield [layer.weight.detach() for layer in layers]
    if layers[0].bias is not None:
        yield [layer.bias.detach() for layer in layers]


class SharedLinear(nn.Module):
    """A fused layer that computes its outputs once for all of its parts.

    Args:
        layer: The fused layer.
        parts: The number of parts.
    """

    def __init__(self, layer: nn.Module, parts: int) -> None:
        super().__init__()
        self.layer = layer
        self._parts = parts
        self._left = 0
        self._latest: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's outputs for `x`, cached until all parts have used them."""
        if self._latest is None or self._latest[0] is not x:
            self._latest = (x, self.layer(x))
            self._left = self._parts
        outputs = self._latest[1]
        self._left -= 1
        if not self._left:
            self._latest = None
        return outputs


class FusedPart(nn.Module):
    """One layer's slice of a fused layer's outputs.

    Args:
        shared: The fused layer.
        start: The first output of this layer.
        width: The number of its outputs.
    """

    def __init__(self, shared: SharedLinear, start: int, width: int) -> None:
        super().__init__()
        self.shared = shared
        self.start = start
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., in_features]` to `[..., width]`, of the same dtype."""
        outputs: Tensor = self.shared(x)
        return outputs.narrow(-1, self.start, self.width)
