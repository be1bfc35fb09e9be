"""The C++ kernels for logits: passes pointers and strides."""

from collections.abc import Mapping
from ctypes import CDLL, Array, c_int, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu.caches import DTYPES
from octavo.kernels.sampling_tensors import SamplingTensors
from octavo.kernels.scores import Scores


class LogitKernels:
    """The kernels of `octavo.kernels.logits`.

    Args:
        library: The compiled kernels.
    """

    def __init__(self, library: CDLL) -> None:
        rows = (c_void_p, c_int64, c_int64, c_int64)
        self._argmax, self._mask = library.octavo_argmax, library.octavo_mask_logits
        self._draw, self._score = library.octavo_draw_tokens, library.octavo_score_tokens
        for function, arguments in (
            (self._argmax, (c_int, c_void_p)),
            (self._mask, (c_int, c_void_p, c_int64)),
            (self._draw, [c_void_p] * 6),
            (self._score, (c_void_p, c_int64, *[c_void_p] * 3)),
        ):
            function.argtypes, function.restype = (*rows, *arguments, c_int), None

    def argmax(self, rows: Tensor) -> Tensor:
        """Return the column of each row's greatest element; see `octavo.kernels.logits.argmax`.

        48 rows of 49,152 take 0.5 ms on 2 cores; torch takes 1.9 ms.
        """
        rows = _rows(rows)
        count, columns = rows.shape
        places = torch.empty(count, dtype=torch.int64)
        self._argmax(
            *(rows.data_ptr(), count, rows.stride(0), columns, DTYPES[rows.dtype]),
            *(places.data_ptr(), torch.get_num_threads()),
        )
        return places

    def mask_logits(self, logits: Tensor, rows: np.ndarray, masks: np.ndarray) -> None:
        """Make tokens impossible, in place; see `octavo.kernels.logits.mask_logits`."""
        if logits.stride(1) != 1:
            raise ValueError(f"rows of logits must be contiguous: strides are {logits.stride()}")
        places = _places_of(dict(zip(rows.tolist(), masks, strict=True)), len(logits))
        self._mask(
            *(logits.data_ptr(), len(logits), logits.stride(0), logits.shape[1]),
            *(DTYPES[logits.dtype], places, masks.shape[1], torch.get_num_threads()),
        )

    def draw_tokens(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        """Sample a token from each row; see `octavo.kernels.logits.draw_tokens`."""
        logits = _rows(logits.float())
        count, columns = logits.shape
        tokens = torch.empty(count, dtype=torch.int64)
        kinds = np.float64, np.int64, np.float64, np.float64, np.float64
        numbers = list(map(np.ascontiguousarray, sampling, kinds))
        self._draw(
            *(logits.data_ptr(), count, logits.stride(0), columns),
            *(column.ctypes.data for column in numbers),
            *(tokens.data_ptr(), torch.get_num_threads()),
        )
        return tokens

    def score_tokens(self, logits: Tensor, tokens: Tensor, most: int) -> Scores:
        """Return log-probabilities; see `octavo.kernels.logits.score_tokens`."""
        logits = _rows(logits.float())
        count, columns = logits.shape
        scores = Scores(
            torch.empty(count),
            torch.empty((count, most), dtype=torch.int64),
            torch.empty((count, most)),
        )
        self._score(
            *(logits.data_ptr(), count, logits.stride(0), columns),
            *(tokens.contiguous().data_ptr(), most),
            *(tensor.data_ptr() for tensor in scores),
            torch.get_num_threads(),
        )
        return scores


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous: itself, or a copy."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _places_of(masks: Mapping[int, np.ndarray], num_rows: int) -> "Array[c_void_p]":
    """Return the address of each row's mask; None for a row that has none."""
    places = (c_void_p * num_rows)()
    for row, mask in masks.items():
        places[row] = mask.ctypes.data
    return places
