"""The sum over ranks as a PyTorch operator: `octavo::sum_over_ranks`.

With an operator, the compiler captures a model with its sums in one graph.
"""

import torch
from torch import Tensor
from torch.library import Library, register_fake

from octavo.engine.parallel.world import current_world


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks."""
    total: Tensor = torch.ops.octavo.sum_over_ranks(x.contiguous())
    return total


def add_up(x: Tensor) -> Tensor:
    """Sum over the ranks of this process' world, which must be set."""
    world = current_world()
    assert world is not None
    return world.sum(x)


_library = Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("sum_over_ranks(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]
_library.impl("sum_over_ranks", add_up, "CPU")  # type: ignore[no-untyped-call]
_library.impl("sum_over_ranks", add_up, "CUDA")  # type: ignore[no-untyped-call]
register_fake("octavo::sum_over_ranks", torch.empty_like)

OPERATOR = torch.ops.octavo.sum_over_ranks.default
