"""Linear layers of one input, such as Q, K and V, joined into one that is computed once.

A few tokens' product waits for its weights; that of more, with outputs too few, leaves
cores or multiprocessors without work. One product of all outputs is better at both.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from octavo.engine.attention.operator import DryRun, attending
from octavo.engine.models.linear.plain_linears import plain_linears
from octavo.engine.models.linear.wide_linear import WideLinear


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
    left out; so are layers that do more than multiply.
    """
    plain = plain_linears(model)
    inputs: dict[nn.Module, Tensor] = {}  # held, so that none takes another's place
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given: inputs.update({layer: given[0]}))
        for layer in plain
    ]
    token = torch.zeros((1, 1), dtype=torch.int64, device=model.device)
    with attending(DryRun()):
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


def join(group: list[Place], make: Callable[[nn.Linear], nn.Module]) -> None:
    """Has layers of one input give their shares of one layer's outputs.

    Args:
        group: the layers.
        make: gives what takes the place of them joined.
    """
    layers = [place.layer for place in group]
    whole = Shared(make(as_linear(*map(torch.cat, weights_and_biases(*layers)))), len(group))
    start = 0
    for place in group:
        width = place.layer.out_features
        setattr(place.parent, place.name, Part(whole, start, width))
        start += width


def join_linears(model: PreTrainedModel) -> None:
    """Joins a model's plain linear layers of one input; the last one gives float32.

    Args:
        model: changed in place.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    groups = linears_by_input(model)
    while groups:
        group = groups.pop()  # to be freed once it is replaced: there may be no room for both
        first = group[0]
        layers = [place.layer for place in group]
        if any(type(layer) is not nn.Linear for layer in layers):
            continue  # of a quantized checkpoint, say
        if first.layer is head:
            setattr(first.parent, first.name, WideLinear(first.layer))
        elif len(group) > 1 and len({layer.weight.dtype for layer in layers}) == 1:
            join(group, lambda joined: joined)


def weights_and_biases(*layers: nn.Linear) -> Iterator[list[Tensor]]:
    """Gives the layers' weights, and then their biases if they have any."""
    yield [layer.weight.detach() for layer in layers]
    if layers[0].bias is not None:
        yield [layer.bias.detach() for layer in layers]


def as_linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
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
