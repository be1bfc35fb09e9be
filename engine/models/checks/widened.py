"""Runs a 16-bit model in float32, in little more memory.

In 16 bits, rounding hides faults: a wrong scale of attention by a tenth, or positions off by one,
change the logits no more than rounding does. In float32 they stand out a thousandfold. A large
model's weights are converted when used, and dropped afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from octavo.engine.models.deferred import in_float32, own_tensors
from octavo.engine.parallel.world import World

NARROW = {torch.bfloat16, torch.float16}
SMALL = 50_000_000
"""Maximum weights of a model that is converted as a whole, for all of its runs."""


def is_narrow(model: nn.Module) -> bool:
    """Return whether a model has weights in 16 bits."""
    return any(weight.dtype in NARROW for weight in _weights(model))


def is_small(model: nn.Module) -> bool:
    """Return whether memory may hold several copies of a model's weights, also in float32."""
    return sum(weight.numel() for weight in set(_weights(model))) <= SMALL


def all_small(model: nn.Module, world: World) -> bool:
    """Return whether all ranks' parts are small, so that all ranks run the same checks."""
    return bool(world.least(is_small(model))[0])


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """Make a model run in float32 within the context.

    Args:
        model: The model, whose own weights do not change.
    """
    small = is_small(model)
    narrow = [
        (kept, name, tensor)
        for kept, name, tensor in chain.from_iterable(map(own_tensors, model.modules()))
        if tensor.dtype in NARROW
    ]
    made: dict[Tensor, Tensor] = {}  # tied weights stay tied
    try:
        for kept, name, tensor in narrow:
            if tensor not in made:
                wide = in_float32(tensor).make() if small else in_float32(tensor)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[tensor] = nn.Parameter(wide, requires_grad=False) if is_parameter else wide
            kept[name] = made[tensor]
        yield
    finally:
        for kept, name, tensor in narrow:
            if kept.get(name) is made.get(tensor):
                kept[name] = tensor


def _weights(model: nn.Module) -> Iterator[Tensor]:
    return chain(model.parameters(), model.buffers())
