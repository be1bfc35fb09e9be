"""Mixtures of experts in C++, with weights packed once.

Transformers multiplies each expert's rows by PyTorch's kernels, on a CPU one expert after the
other. Here threads share the panels of all experts, so one token's experts keep all threads busy.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import CDLL, POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cpu.linear import GROUP, LinearKernels

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
"""Weight types by packed dtype; the same as in experts.h. 4-bit weights are bytes."""
_E2M1 = 4
"""The type of 4-bit weights with one-byte scales and without zero points."""


class _Product(Structure):
    """One of the two products; the same as in experts.h."""

    _fields_ = (
        *(("panels", c_void_p), ("bias", c_void_p), ("factors", c_void_p)),
        *(("factor_stride", c_int64), ("scales", c_void_p)),
    )


class _Activation(Structure):
    """The activation; the same as in experts.h."""

    _fields_ = (
        *(("kind", c_int), ("gated", c_int)),
        *(("alpha", c_float), ("limit", c_float), ("offset", c_float)),
    )


class _Layer(Structure):
    """A layer; the same as in experts.h."""

    _fields_ = (
        *(("weights", c_int), ("experts", c_int64), ("hidden", c_int64), ("inner", c_int64)),
        *(("up", _Product), ("down", _Product), ("activation", _Activation)),
    )


class _Routing(Structure):
    """Each row's experts; the same as in experts.h."""

    _fields_ = (
        *(("experts", c_void_p), ("expert_strides", c_int64 * 2)),
        *(("weights", c_void_p), ("weight_strides", c_int64 * 2)),
        *(("rows", c_int64), ("chosen", c_int64)),
    )


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
        self._experts = library.octavo_experts
        self._experts.argtypes = (
            *(c_void_p, c_int64, POINTER(_Routing), POINTER(_Layer), c_void_p, c_int),
        )
        self._experts.restype = None
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
        return dtype in _KINDS and hidden % multiple == 0 and inner % multiple == 0

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

    def experts(  # noqa: PLR0917 - as the operator
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        up: Tensor,
        up_bias: Tensor,
        down: Tensor,
        down_bias: Tensor,
        activation: int,
        gated: int,
        alpha: float,
        limit: float,
        offset: float,
        up_factors: Tensor | None = None,
        up_scales: Tensor | None = None,
        down_factors: Tensor | None = None,
        down_scales: Tensor | None = None,
    ) -> Tensor:
        """Compute each row's experts, weighted and summed.

        Args:
            x: `[rows, hidden]`, float32 if the weights are, else bfloat16.
            expert_ids: `[rows, chosen]` int64; experts that do not exist are skipped.
            weights: `[rows, chosen]` float32.
            up: The panels of the first product; see `PackedProduct`.
            up_bias: The bias of the first product; see `PackedProduct`.
            down: The panels of the second product; see `PackedProduct`.
            down_bias: The bias of the second product; see `PackedProduct`.
            activation: `Activation.number`.
            gated: 1 if `arrange` interleaved the first product's gates.
            alpha: `Activation.alpha`.
            limit: `Activation.limit`.
            offset: `Activation.offset`.
            up_factors: The factors of the first product; see `PackedProduct`.
            up_scales: The scales of the first product; see `PackedProduct`.
            down_factors: The factors of the second product; see `PackedProduct`.
            down_scales: The scales of the second product; see `PackedProduct`.

        Returns:
            `[rows, hidden]`, of the dtype of `x`, rounded once.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        assert x.dtype == (torch.float32 if up.dtype == torch.float32 else torch.bfloat16)
        assert expert_ids.dtype == torch.int64
        assert weights.dtype == torch.float32
        pair = c_int64 * 2
        routing = _Routing(
            *(expert_ids.data_ptr(), pair(*expert_ids.stride())),
            *(weights.data_ptr(), pair(*weights.stride()), *expert_ids.shape),
        )
        layer = _Layer(
            *(self._kind(up), up.shape[0], x.shape[1], count_inputs(down)),
            _product(PackedProduct(up, up_bias, up_factors, up_scales)),
            _product(PackedProduct(down, down_bias, down_factors, down_scales)),
            _Activation(activation, gated, alpha, limit, offset),
        )
        out = torch.empty(x.shape, dtype=x.dtype)
        self._experts(
            *(x.data_ptr(), x.stride(0), byref(routing), byref(layer)),
            *(out.data_ptr(), torch.get_num_threads()),
        )
        return out

    def _kind(self, panels: Tensor) -> int:
        in_e2m1 = self.linear.panel * (GROUP // 2 + 1)  # bytes of a panel's group
        if panels.dtype == torch.uint8 and panels.shape[3] == in_e2m1:
            return _E2M1
        return _KINDS[panels.dtype]

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


def _product(packed: PackedProduct) -> _Product:
    product = _Product(packed.panels.data_ptr(), packed.bias.data_ptr())
    if packed.factors is not None and packed.scales is not None:
        product.factors, product.scales = packed.factors.data_ptr(), packed.scales.data_ptr()
        product.factor_stride = packed.factors.stride(0) if packed.factors.shape[0] > 1 else 0
    return product
