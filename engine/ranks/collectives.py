"""The sum over ranks as a PyTorch operator: `octavo::sum_over_ranks_`.

With an operator, the compiler captures a model with its collectives in one graph.
"""

import torch
from torch import Tensor
from torch.library import Library, register_fake

from octavo.engine.ranks.world import current_world


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks; `x` may be overwritten."""
    x = x.contiguous()
    torch.ops.octavo.sum_over_ranks_(x)
    return x


def _sum(x: Tensor) -> None:
    world = current_world()
    assert world is not None
    world.sum_(x)


_library = Library("octavo", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("sum_over_ranks_(Tensor(a!) x) -> ()")  # type: ignore[no-untyped-call]
_library.impl("sum_over_ranks_", _sum, "CPU")  # type: ignore[no-untyped-call]
_library.impl("sum_over_ranks_", _sum, "CUDA")  # type: ignore[no-untyped-call]
register_fake("octavo::sum_over_ranks_", lambda x: None)  # noqa: ARG005
