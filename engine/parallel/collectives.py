"""Communication between ranks within a step, as PyTorch operators.

With operators, the compiler captures a model with its sums and stages in one graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from octavo.engine.operators import define
from octavo.engine.parallel.world import World, current_world


def sum_over_ranks(x: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks."""
    total: Tensor = torch.ops.octavo.sum_over_ranks(x.contiguous())
    return total


def add_up(x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Sum over the ranks of this process' world, which must be set; add a residual.

    Args:
        x: The tensor.
        residual: What to add.
        out: See `World.sum`.
    """
    total = x.clone() if _alone.get() else _world().sum(x, out)
    return total if residual is None else total + residual


def _world() -> World:
    world = current_world()
    assert world is not None
    return world


_apart: ContextVar[bool] = ContextVar("octavo_stages_apart", default=False)


_alone: ContextVar[bool] = ContextVar("octavo_ranks_alone", default=False)


@contextmanager
def ranks_alone() -> Iterator[None]:
    """Let sums return this rank's part: for runs that not all ranks make."""
    reset = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(reset)


@contextmanager
def stages_apart() -> Iterator[None]:
    """Let stages neither take nor send hidden states: for runs that not all stages make."""
    reset = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(reset)


def receive_hidden(x: Tensor) -> Tensor:
    """Return the previous stage's hidden states; this stage's embeddings `x` are like them."""
    hidden: Tensor = torch.ops.octavo.receive_hidden(x.contiguous())
    return hidden


def send_hidden(x: Tensor) -> Tensor:
    """Send hidden states to the next stage; return them."""
    sent: Tensor = torch.ops.octavo.send_hidden(x.contiguous())
    return sent


OPERATOR = define(
    "sum_over_ranks(Tensor x, Tensor? residual=None) -> Tensor",
    lambda x, *_: torch.empty_like(x),
    CPU=add_up,
    CUDA=add_up,
)
define(
    "receive_hidden(Tensor x) -> Tensor",
    torch.empty_like,
    CPU=lambda x: torch.zeros_like(x) if _apart.get() else _world().receive_hidden(x),
)
define(
    "send_hidden(Tensor x) -> Tensor",
    torch.empty_like,
    CPU=lambda x: (x if _apart.get() else _world().send_hidden(x)).clone(),
)
