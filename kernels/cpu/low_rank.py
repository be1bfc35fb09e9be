"""The adapters of a step, laid out for C++."""

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_int32, c_int64, c_void_p

from octavo.kernels.low_rank import (
    LowRankBatch,
    LowRankLayer,
    LowRankPart,
    StepAdapters,
)


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
