"""Runs a model in 16 bits as the same model in float32, in little more memory.

In 16 bits, rounding hides faults: attention whose scale is wrong by a tenth, or positions that are
off by one, change the logits no more than it does. In float32 they stand out a thousandfold. The
weights of a large model are converted layer by layer when it runs, and dropped afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

NARROW = {torch.bfloat16, torch.float16}
SMALL = 250_000_000
"""Most weights of a model that is converted at once, for all of its runs."""


def is_narrow(model: nn.Module) -> bool:
    """Return whether a model has weights in 16 bits."""
    return any(True for _ in _unit(model, recurse=True))


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Let a model run in float32 within.

    Args:
        model: The model, whose weights stay as they are.
    """
    units = list(_units(model))
    everything = {id(weight): weight for _, weights in units for weight in weights}
    if sum(weight.numel() for weight in everything.values()) <= SMALL:
        own = _Widened(list(everything.values()))
        own.widen()
        try:
            yield
        finally:
            own.restore()
        return
    handles = []
    for module, weights in units:
        own = _Widened(weights)
        handles.append(module.register_forward_pre_hook(own.widen))
        handles.append(module.register_forward_hook(own.restore, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Widened:
    """The weights that are in float32 while one module runs.

    Args:
        weights: In 16 bits.
    """

    def __init__(self, weights: list[Tensor]) -> None:
        self._weights = weights
        self._narrow: list[Tensor] = []

    def widen(self, *_: object) -> None:
        """Convert them."""
        self._narrow = [weight.data for weight in self._weights]
        for weight in self._weights:
            weight.data = weight.data.float()

    def restore(self, *_: object) -> None:
        """Put back what they were."""
        for weight, narrow in zip(self._weights, self._narrow, strict=False):
            weight.data = narrow
        self._narrow = []


def _units(model: nn.Module) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    """Yield the modules whose weights are converted together, with these.

    They are a model's layers, whose code may read the weights of modules within, and each module
    outside of them.
    """
    within: set[nn.Module] = set()
    for module in model.modules():
        if module in within:
            continue
        for layer in module if isinstance(module, nn.ModuleList) else []:
            within.update(layer.modules())
            yield from _unit(layer, recurse=True)
        yield from _unit(module, recurse=False)


def _unit(module: nn.Module, *, recurse: bool) -> Iterator[tuple[nn.Module, list[Tensor]]]:
    tensors = chain(module.parameters(recurse), module.buffers(recurse))
    if weights := [tensor for tensor in tensors if tensor.dtype in NARROW]:
        yield module, weights
