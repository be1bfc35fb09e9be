"""The C++ kernels of stateful layers: passes tensors' pointers and strides."""

import math
from ctypes import (
    CDLL,
    Structure,
    byref,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_void_p,
)
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.state_rows import StateRows

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Rows(Structure):
    """The states of a batch's sequences; the same as in states.h."""

    _fields_ = (
        *(("state", c_void_p), ("block_stride", c_int64), ("row_size", c_int64)),
        *(("tables", c_void_p), ("table_stride", c_int64)),
        *(("query_starts", c_void_p), ("seq_lens", c_void_p)),
        *(("num_blocks", c_int32), ("rows_per_block", c_int32)),
        *(("first_row", c_int32), ("num_seqs", c_int32)),
    )


class _CausalConv(Structure):
    """The arguments of causal_conv.cpp."""

    _fields_ = (
        *(("rows", _Rows), ("x", c_void_p), ("x_stride", c_int64)),
        *(("weight", c_void_p), ("bias", c_void_p), ("out", c_void_p)),
        *(("channels", c_int32), ("channels_per_row", c_int32), ("width", c_int32)),
        *(("dtype", c_int32), ("weight_dtype", c_int32), ("silu", c_int32)),
    )


class _Ssd(Structure):
    """The arguments of ssd.cpp."""

    _fields_ = (
        *(("rows", _Rows), ("x", c_void_p), ("b", c_void_p), ("c", c_void_p)),
        *(("x_stride", c_int64), ("b_stride", c_int64), ("c_stride", c_int64)),
        *(("dt", c_void_p), ("a", c_void_p), ("d", c_void_p), ("dt_bias", c_void_p)),
        *(("out", c_void_p), ("heads", c_int32), ("head_dim", c_int32), ("groups", c_int32)),
        *(("state_size", c_int32), ("dtype", c_int32), ("softplus", c_int32)),
        *(("least_dt", c_float), ("greatest_dt", c_float)),
    )


class _GatedDelta(Structure):
    """The arguments of gated_delta.cpp."""

    _fields_ = (
        *(("rows", _Rows), ("query", c_void_p), ("key", c_void_p), ("value", c_void_p)),
        *(("query_stride", c_int64), ("key_stride", c_int64), ("value_stride", c_int64)),
        *(("g", c_void_p), ("beta", c_void_p), ("out", c_void_p)),
        *(("key_heads", c_int32), ("value_heads", c_int32)),
        *(("key_dim", c_int32), ("value_dim", c_int32), ("dtype", c_int32)),
        *(("decays_elements", c_int32), ("normalize", c_int32), ("scale", c_float)),
    )


class _SelectiveScan(Structure):
    """The arguments of selective_scan.cpp."""

    _fields_ = (
        *(("rows", _Rows), ("x", c_void_p), ("b", c_void_p), ("c", c_void_p)),
        *(("x_stride", c_int64), ("b_stride", c_int64), ("c_stride", c_int64)),
        *(("dt", c_void_p), ("dt_stride", c_int64)),
        *(("a", c_void_p), ("d", c_void_p), ("dt_bias", c_void_p), ("out", c_void_p)),
        *(("channels", c_int32), ("channels_per_row", c_int32), ("state_size", c_int32)),
        *(("dtype", c_int32), ("dt_dtype", c_int32), ("softplus", c_int32)),
    )


class StateKernels:
    """The kernels of `octavo.kernels.states`, in C++. Several threads may call them.

    Args:
        library: The compiled kernels.
    """

    def __init__(self, library: CDLL) -> None:
        self._causal_conv = library.octavo_causal_conv
        self._ssd = library.octavo_ssd
        self._gated_delta = library.octavo_gated_delta
        self._selective_scan = library.octavo_selective_scan
        for function in (
            *(self._causal_conv, self._ssd),
            *(self._gated_delta, self._selective_scan),
        ):
            function.argtypes, function.restype = (c_void_p, c_int), c_int

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rows: StateRows,
        *,
        activation: str | None = None,
    ) -> Tensor:
        """Convolve each channel over its latest inputs; see `octavo.kernels.states`."""
        x, weight = _tokens(x), weight.contiguous()
        bias = None if bias is None else bias.to(weight.dtype).contiguous()
        out = _results(x)
        call = _CausalConv(
            *(_rows(rows), x.data_ptr(), x.stride(0), weight.data_ptr(), _pointer(bias)),
            *(out.data_ptr(), x.shape[1], rows.state.shape[2], weight.shape[1]),
            *(_DTYPES[x.dtype], _DTYPES[weight.dtype], activation == "silu"),
        )
        _run(self._causal_conv, call, rows)
        return out

    def ssd(  # noqa: PLR0917
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        rows: StateRows,
        *,
        d: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limits: tuple[float, float] = (0.0, math.inf),
    ) -> Tensor:
        """Compute Mamba-2's state space model; see `octavo.kernels.states`."""
        x, b, c = _tokens(x), _tokens(b), _tokens(c)
        steps, rates, d, dt_bias = _floats(dt), _floats(a), _floats(d), _floats(dt_bias)
        out = _results(x)
        call = _Ssd(
            *(_rows(rows), x.data_ptr(), b.data_ptr(), c.data_ptr()),
            *(x.stride(0), b.stride(0), c.stride(0)),
            *(_pointer(steps), _pointer(rates), _pointer(d), _pointer(dt_bias), out.data_ptr()),
            *(*x.shape[1:], *b.shape[1:], _DTYPES[x.dtype], dt_softplus, *dt_limits),
        )
        _run(self._ssd, call, rows)
        return out

    def gated_delta(  # noqa: PLR0917
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        rows: StateRows,
        *,
        scale: float,
        normalize: bool = False,
    ) -> Tensor:
        """Compute the gated delta rule; see `octavo.kernels.states`."""
        query, key, value = _tokens(query), _tokens(key), _tokens(value)
        decays, betas = _floats(g), _floats(beta)
        out = _results(value)
        call = _GatedDelta(
            *(_rows(rows), query.data_ptr(), key.data_ptr(), value.data_ptr()),
            *(query.stride(0), key.stride(0), value.stride(0)),
            *(_pointer(decays), _pointer(betas), out.data_ptr(), key.shape[1], value.shape[1]),
            *(key.shape[2], value.shape[2], _DTYPES[value.dtype]),
            *(g.dim() == 3, normalize, scale),
        )
        _run(self._gated_delta, call, rows)
        return out

    def selective_scan(  # noqa: PLR0917
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        rows: StateRows,
        *,
        d: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
    ) -> Tensor:
        """Compute Mamba's selective state space model; see `octavo.kernels.states`."""
        x, dt, b, c = _tokens(x), _tokens(dt), _tokens(b), _tokens(c)
        rates, d, dt_bias = _floats(a), _floats(d), _floats(dt_bias)
        out = _results(x)
        call = _SelectiveScan(
            *(_rows(rows), x.data_ptr(), b.data_ptr(), c.data_ptr()),
            *(x.stride(0), b.stride(0), c.stride(0), dt.data_ptr(), dt.stride(0)),
            *(_pointer(rates), _pointer(d), _pointer(dt_bias), out.data_ptr(), x.shape[1]),
            *(*rows.state.shape[2:], _DTYPES[x.dtype], _DTYPES[dt.dtype], dt_softplus),
        )
        _run(self._selective_scan, call, rows)
        return out


def _tokens(x: Tensor) -> Tensor:
    """Return a tensor whose tokens are contiguous: itself, or a copy."""
    inner = x.stride()[1:]
    dense = inner[-1] == 1 and (len(inner) == 1 or inner[0] == x.shape[2])
    return x if dense else x.contiguous()


def _floats(x: Tensor | None) -> Tensor | None:
    """Return a contiguous float32 tensor: itself, or a copy."""
    return None if x is None else x.to(torch.float32).contiguous()


def _pointer(x: Tensor | None) -> int | None:
    """Return a tensor's address."""
    return None if x is None else x.data_ptr()


def _results(like: Tensor) -> Tensor:
    """Return an uninitialized tensor for results."""
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _rows(rows: StateRows) -> _Rows:
    """Return the rows as C++ takes them."""
    state, tables = rows.state, rows.tables
    return _Rows(
        *(state.data_ptr(), state.stride(0), math.prod(state.shape[2:])),
        *(tables.data_ptr(), tables.stride(0)),
        *(rows.query_starts.data_ptr(), rows.seq_lens.data_ptr()),
        *(state.shape[0], state.shape[1], rows.first_row, tables.shape[0]),
    )


def _run(function: Any, call: Structure, rows: StateRows) -> None:  # noqa: ANN401
    """Call a kernel.

    Raises:
        IndexError: A table names a block that is not in the cache.
    """
    if bad := function(byref(call), torch.get_num_threads()):
        raise IndexError(
            f"the table of sequence {bad - 1} names a block of a state that is not in the cache's"
            f" {rows.state.shape[0]}: {rows.tables[bad - 1].tolist()}"
        )
