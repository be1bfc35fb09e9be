"""Products of low rank in C++."""

from ctypes import CDLL, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from octavo.kernels.low_rank import LowRankBatch

_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class LowRankKernels:
    """The kernels of low_rank.cpp.

    Args:
        library: The compiled kernels.
    """

    def __init__(self, library: CDLL) -> None:
        self._add = library.octavo_add_low_rank
        self._add.argtypes = (
            *(c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int, c_int),
            *(c_void_p, c_void_p, c_int64, c_void_p, c_int),
        )
        self._add.restype = None

    def add_low_rank(self, out: Tensor, x: Tensor, batch: LowRankBatch, layer: int) -> None:
        """Add products of low rank; see `octavo.kernels.ops.add_low_rank`."""
        self._add(
            *(x.data_ptr(), x.stride(0), x.shape[1], out.data_ptr(), out.stride(0), out.shape[1]),
            *(_DTYPES[x.dtype], int(out.dtype != x.dtype)),
            *(batch.rows.data_ptr(), batch.tiles.data_ptr(), len(batch.tiles)),
            *(batch.records[layer].data_ptr(), torch.get_num_threads()),
        )
