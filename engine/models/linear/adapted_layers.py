"""Linear layers that LoRA adapters adapt, and the current step's adapters.

`applying` sets the adapters around the model, as `attending` sets batch and cache. Packed layers
add the products in their kernels. Other layers have a hook that calls `add_adapters`; in a traced
step this is the operator `octavo::add_adapters`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from octavo.engine.operators import define
from octavo.kernels import cpu
from octavo.kernels.low_rank import StepAdapters
from octavo.kernels.ops import add_low_rank


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement of a layer's outputs in a packed layer.

    Attributes:
        packed: The packed layer's number among those that adapters adapt.
        panel: The first panel with outputs of the layer.
        lane: The first lane of each panel with outputs of the layer.
        lanes: Number of such lanes.
        shift: Number of lanes in the first panel before the first output.
        order: The number of the packed layer's input order in `Targets.orders`; -1: as in the
            model.
    """

    packed: int
    panel: int
    lane: int
    lanes: int
    shift: int = 0
    order: int = -1

    def panels(self, outputs: int) -> int:
        """Return the number of panels with outputs of the layer."""
        return -(-(self.shift + outputs) // self.lanes)


@dataclass(frozen=True, slots=True)
class LayerPart:
    """A rank's part of a linear layer.

    Attributes:
        inputs: `[n]`, the numbers of its inputs.
        outputs: `[n]`, the numbers of its outputs.
        sizes: The numbers of inputs and outputs of the whole layer.
    """

    inputs: np.ndarray
    outputs: np.ndarray
    sizes: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer that adapters may adapt.

    Attributes:
        index: Its index among the model's targets.
        inputs: Number of its inputs.
        outputs: Number of its outputs.
        is_head: Whether it computes the logits: then it runs only for some tokens.
        placement: Its placement in a packed layer; None if it is not packed.
        part: Which inputs and outputs of the model's layer these are; None: all.
    """

    index: int
    inputs: int
    outputs: int
    is_head: bool = False
    placement: Placement | None = None
    part: LayerPart | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of inputs and outputs of the model's layer."""
        return (self.inputs, self.outputs) if self.part is None else self.part.sizes


class TracedAdapters:
    """Represents a step's adapters during tracing."""


_adapters: ContextVar[StepAdapters | TracedAdapters | None] = ContextVar(
    "octavo_step_adapters", default=None
)


@contextmanager
def applying(adapters: StepAdapters | TracedAdapters | None) -> Iterator[None]:
    """Set the adapters of the model that runs in this context; None for none."""
    if adapters is None and _adapters.get() is None:
        yield
        return
    token = _adapters.set(adapters)
    kept = _set_in_kernels(current_adapters())
    try:
        yield
    finally:
        _adapters.reset(token)
        kept = _set_in_kernels(current_adapters())
        del kept


def _set_in_kernels(adapters: StepAdapters | None) -> object:
    """Set the adapters of packed layers; see `octavo.kernels.cpu.set_adapters`."""
    on_gpu = adapters is not None and adapters.tokens.records.is_cuda
    return cpu.set_adapters(None if on_gpu else adapters)


def current_adapters() -> StepAdapters | None:
    """Return the adapters of the current context; None if no sequence has one."""
    adapters = _adapters.get()
    return None if isinstance(adapters, TracedAdapters) else adapters


def add_adapters(target: Target, x: Tensor, out: Tensor) -> Tensor:
    """Add the products of the current adapters to a layer's outputs, in place unless it is traced.

    Args:
        target: The layer.
        x: `[..., inputs]`.
        out: `[..., outputs]`, of the dtype of `x` or float32.

    Returns:
        `[..., outputs]`.

    Raises:
        ValueError: The number of rows is not the step's.
    """
    adapters = _adapters.get()
    if adapters is None:
        return out
    rows = x.reshape(-1, target.inputs)
    if isinstance(adapters, TracedAdapters):
        added: Tensor = ADD_ADAPTERS(
            out.reshape(-1, target.outputs), rows, target.index, int(target.is_head)
        )
        return added.view(out.shape)
    batch = adapters.batch(of_logits=target.is_head)
    # Must be a view: products added to a copy would be lost.
    add_low_rank(out.view(-1, target.outputs), rows, batch, target.index)
    return out


ADD_ADAPTERS = define(
    "add_adapters(Tensor out, Tensor x, int target, int of_logits) -> Tensor",
    lambda out, *_: out.new_empty(out.shape),
    native=True,
)
"""`octavo::add_adapters`: adds the products of a traced layer that is not packed."""
