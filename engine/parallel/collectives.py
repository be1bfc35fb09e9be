"""The sum over ranks as a PyTorch operator: `octavo::sum_over_ranks`.

With an operator, the compiler captures a model with its sums in one graph.
"""

import torch
from torch import Tensor

from octavo.engine.operators import define
from octavo.engine.parallel.world import current_world


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks."""
    total: Tensor = torch.ops.octavo.sum_over_ranks(x.contiguous())
    return total


def add_up(x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Sum over the ranks of this process' world, which must be set; add a residual."""
    world = current_world()
    assert world is not None
    total = world.sum(x)
    return total if residual is None else total + residual


OPERATOR = define(
    "sum_over_ranks(Tensor x, Tensor? residual=None) -> Tensor",
    lambda x, *_: torch.empty_like(x),
    CPU=add_up,
    CUDA=add_up,
)
