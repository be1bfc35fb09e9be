"""Mixtures of experts in C++, with weights packed once.

Transformers multiplies each expert's rows by PyTorch's kernels, on a CPU one expert after the
other. Here threads share the panels of all experts, so one token's experts keep all threads busy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, Structure, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cpu.linear import GROUP, LinearKernels

_DTYPES = {torch.float32, torch.bfloat16, torch.int8, torch.uint8}
"""Dtypes of packed weights. 4-bit weights are bytes."""


class _Forced(Structure):
    """The experts that one call computes in place of its own routing; the same as in experts.h."""

    _fields_ = (
        *(("experts", c_void_p), ("weights", c_void_p)),
        *(("own_experts", c_void_p), ("own_weights", c_void_p)),
        *(("first", c_int64), ("rows", c_int64), ("chosen", c_int64)),
    )


class NotForcedError(RuntimeError):
    """A step did not use the routing that was forced on it."""


class PackedProduct(NamedTuple):
    """One product of all experts.

    Attributes:
        panels: `[experts, panels, words or groups, ...]`: the experts' packed weights.
        bias: `[experts, padded outputs]` float32.
        factors: `[experts or 1, inputs]` float32, factors of inputs before they are rounded to 8
            bits; None for weights in other types.
        scales: `[experts, 2, padded outputs]` float32, with weights in 8 bits: the factors of the
            weights and the sums of each output's scaled weights; else None.
    """

    panels: Tensor
    bias: Tensor
    factors: Tensor | None = None
    scales: Tensor | None = None


class ExpertKernels:
    """The kernel of experts.cpp.

    Args:
        library: The compiled kernels.
        linear: The linear kernels, which pack each expert's weights.

    Attributes:
        linear: The argument.
    """

    def __init__(self, library: CDLL, linear: LinearKernels) -> None:
        self.linear = linear
        self._force = library.octavo_force_experts
        self._force.argtypes, self._force.restype = (c_void_p, c_int64), c_int64

    @staticmethod
    def takes(hidden: int, inner: int, dtype: torch.dtype) -> bool:
        """Return whether layers of these sizes can be packed.

        Args:
            hidden: Elements of a row.
            inner: Outputs of an expert's first product, after its activation.
            dtype: Dtype of the packed weights; uint8 for 4 bits.
        """
        multiple = GROUP if dtype == torch.uint8 else 4
        return dtype in _DTYPES and hidden % multiple == 0 and inner % multiple == 0

    def arrange(self, values: Tensor, *, gated: bool) -> Tensor:
        """Arrange one expert's outputs as in panels.

        Args:
            values: `[outputs, ...]`; if gated, the gates and then the up projections.
            gated: Whether there are gates.
        """
        if not gated:
            return values
        gate, up = values.chunk(2)
        return self.linear.interleave(gate, up)

    @contextmanager
    def forced(
        self, routings: Sequence[tuple[Tensor, Tensor]], first: int
    ) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Force the routing of some rows in this thread's next calls, eager or compiled.

        Args:
            routings: For each call in order, contiguous `[rows, chosen]` int64 experts and float32
                weights.
            first: The first row to which they apply.

        Yields:
            The experts and weights that the calls would have computed for these rows, once the
            context ends.

        Raises:
            NotForcedError: There were fewer calls, or calls had fewer rows or another number of
                experts.
        """
        replaced = [(torch.empty_like(ids), torch.empty_like(weights)) for ids, weights in routings]
        calls = (_Forced * len(replaced))()
        for call, routing, instead in zip(calls, routings, replaced, strict=True):
            tensors = (*routing, *instead)
            assert [tensor.dtype for tensor in tensors] == [torch.int64, torch.float32] * 2
            call.experts, call.weights, call.own_experts, call.own_weights = (
                tensor.data_ptr() for tensor in tensors
            )
            call.first, (call.rows, call.chosen) = first, routing[0].shape
        self._force(calls, len(calls))
        try:
            yield replaced
        finally:
            left = self._force(None, 0)
        if left:
            raise NotForcedError(
                f"{left} of {len(replaced)} layers did not compute the given experts"
            )


def count_inputs(panels: Tensor) -> int:
    """Return the number of inputs of packed weights."""
    if panels.dtype == torch.uint8:
        return panels.shape[2] * GROUP
    return panels.shape[2] * 4 // panels.element_size()
