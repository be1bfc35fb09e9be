"""Low-rank products in C++."""

import ctypes
from collections.abc import Sequence
from ctypes import CDLL, POINTER, Structure, byref, c_int, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.kernels.low_rank import (
    LowRankBatch,
    LowRankLayer,
    LowRankOfLayer,
    LowRankPart,
    StepAdapters,
)

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Batch(Structure):
    """A batch's rows; this struct and those below are the same as in low_rank.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "adapters", "tiles", "records")),
        *((name, c_int64) for name in ("num_rows", "num_tiles", "num_adapters", "max_rank")),
    )


class _Part(Structure):
    _fields_ = tuple((name, c_int32) for name in LowRankPart._fields)


class _Layer(Structure):
    _fields_ = (("parts", POINTER(_Part)), ("num_parts", c_int32), ("of_logits", c_int32))


class _StepAdapters(Structure):
    _fields_ = (
        *(("tokens", _Batch), ("logits", _Batch)),
        *(("layers", POINTER(_Layer)), ("num_layers", c_int64)),
    )


class _Sums(Structure):
    """The sums of adapters that a packed layer adds to its outputs."""

    _fields_ = (
        *(("batch", POINTER(_Batch)), ("parts", POINTER(_Part))),
        *(("num_parts", c_int64), ("inner", c_void_p)),
    )


class LowRankStructs:
    """The structs of a step's adapters. Steps share the table of layers."""

    def __init__(self) -> None:
        self._layers: Sequence[LowRankLayer] | None = None
        self._table: ctypes.Array[_Layer] | None = None

    def make(self, adapters: StepAdapters) -> _StepAdapters:
        """Return a step's struct; the adapters and this object must outlive it."""
        if self._table is None or self._layers is not adapters.layers:
            self._layers = adapters.layers
            self._table = (_Layer * len(adapters.layers))(*map(_layer, adapters.layers))
        return _StepAdapters(
            *(_batch(adapters.tokens), _batch(adapters.logits)),
            *(self._table, len(adapters.layers)),
        )


def _batch(batch: LowRankBatch) -> _Batch:
    return _Batch(
        *(batch.rows.data_ptr(), batch.adapters.ctypes.data, batch.tiles.data_ptr()),
        *(batch.records.data_ptr(), batch.num_rows, len(batch.tiles)),
        *(batch.records.shape[1], batch.max_rank),
    )


def _parts(parts: Sequence[LowRankPart]) -> "ctypes.Array[_Part]":
    return (_Part * len(parts))(*(_Part(*part) for part in parts))


def _layer(layer: LowRankLayer) -> _Layer:
    return _Layer(_parts(layer.parts), len(layer.parts), layer.of_logits)


class LowRankKernels:
    """The kernels of low_rank.cpp.

    Args:
        library: The compiled kernels.

    Attributes:
        structs: Builder of the structs of a step's adapters.
    """

    def __init__(self, library: CDLL) -> None:
        self.structs = LowRankStructs()
        self._add = library.octavo_add_low_rank
        self._add.argtypes = (
            *(c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int, c_int),
            *(c_void_p, c_void_p, c_int64, c_void_p, c_int),
        )
        self._add.restype = None
        self._multiply_down = library.octavo_multiply_down
        self._multiply_down.argtypes = (
            *(POINTER(_Batch), POINTER(_Part), c_int64, c_void_p, c_int, c_int64, c_int64),
            *(c_void_p, c_void_p, c_int),
        )
        self._multiply_down.restype = c_int

    def add_low_rank(self, out: Tensor, x: Tensor, batch: LowRankBatch, layer: int) -> None:
        """Add low-rank products; see `octavo.kernels.ops.add_low_rank`."""
        self._add(
            *(x.data_ptr(), x.stride(0), x.shape[1], out.data_ptr(), out.stride(0), out.shape[1]),
            *(_DTYPES[x.dtype], int(out.dtype != x.dtype)),
            *(batch.rows.data_ptr(), batch.tiles.data_ptr(), len(batch.tiles)),
            *(batch.records[layer].data_ptr(), torch.get_num_threads()),
        )

    def multiply_down(self, x: Tensor, low_rank: LowRankOfLayer, layer: Structure) -> "LowRankSums":
        """Multiply rows by the first matrices of their adapters.

        Args:
            x: `[rows, inputs]` bfloat16 or float32, as the matrices; each row must be contiguous;
                rows may be strided.
            low_rank: The adapters of the packed layer.
            layer: The packed layer's struct, with its norm.

        Raises:
            ValueError: The number of rows is not the batch's.
        """
        batch, parts = _batch(low_rank.batch), _parts(low_rank.parts)
        inner = torch.empty(len(x), len(parts), low_rank.batch.max_rank)
        status = self._multiply_down(
            *(byref(batch), parts, len(parts), x.data_ptr(), int(x.dtype == torch.float32)),
            *(len(x), x.stride(0)),
            *(byref(layer), inner.data_ptr(), torch.get_num_threads()),
        )
        if status < 0:
            raise ValueError(
                f"adapters are for {low_rank.batch.num_rows} rows, but the layer has {len(x)}"
            )
        sums = _Sums(ctypes.pointer(batch), parts, len(parts), inner.data_ptr())
        return LowRankSums(sums if status else None, inner)


class LowRankSums:
    """The sums of adapters that a packed layer adds to its outputs.

    Args:
        struct: The struct that the kernels of linear layers take; None if nothing is added.
        inner: The memory that the struct points to.

    Attributes:
        address: Address of the struct while this object lives; None if nothing is added.
    """

    def __init__(self, struct: _Sums | None, inner: Tensor) -> None:
        self._kept = struct, inner
        self.address = None if struct is None else ctypes.addressof(struct)
