"""The adapters of the step that runs: what adapted layers add to their outputs.

`applying` sets them around the model, as `attending` sets its batch and cache.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.engine.adapters.targets import Target
from octavo.kernels.low_rank import LowRankBatch
from octavo.kernels.ops import add_low_rank


class AdapterStep(Protocol):
    """What adapted layers call."""

    def add(self, target: Target, x: Tensor, out: Tensor) -> None:
        """Add adapters' products to a layer's outputs, in place.

        Args:
            target: The layer.
            x: `[..., inputs]`.
            out: `[..., outputs]`.
        """


@dataclass(frozen=True, slots=True)
class AppliedAdapters:
    """The adapters of a batch.

    Attributes:
        tokens: For layers that run for every token.
        logits: For the head, which runs for the rows of logits.
    """

    tokens: LowRankBatch
    logits: LowRankBatch

    def add(self, target: Target, x: Tensor, out: Tensor) -> None:
        """Add adapters' products to a layer's outputs; see `AdapterStep`."""
        batch = self.logits if target.is_head else self.tokens
        rows = x.reshape(-1, target.inputs)
        # A view, or it raises: a copy would take the products and be dropped.
        add_low_rank(out.view(-1, target.outputs), rows, batch, target.index)


_step: ContextVar[AdapterStep | None] = ContextVar("octavo_adapter_step", default=None)


@contextmanager
def applying(step: AdapterStep) -> Iterator[None]:
    """Set the adapters of the model that runs in this context."""
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def current_adapters() -> AdapterStep | None:
    """Return the adapters of the current context; None if no sequence has one."""
    return _step.get()
