"""Sums over ranks in traced steps: C++ calls back into Python for them."""

import logging
from collections.abc import Callable
from ctypes import CDLL, CFUNCTYPE, c_char, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

_DTYPES = torch.float32, torch.float16, torch.bfloat16
"""Dtypes by their numbers in sum_over_ranks.cpp."""
_Function = CFUNCTYPE(c_int, c_void_p, c_void_p, c_int64, c_int)

log = logging.getLogger(__name__)


class RankSums:
    """The function that sums over ranks in this process's traced steps.

    Args:
        library: The kernels.
    """

    def __init__(self, library: CDLL) -> None:
        self._set = library.octavo_set_sum
        self._set.argtypes, self._set.restype = (_Function,), None
        self._function: Any = None  # keeps the callback alive for C++

    def set(self, add_up: Callable[[Tensor], Tensor]) -> None:
        """Set the function. The thread that runs a step calls it, with the interpreter's lock held.

        Args:
            add_up: Returns the sum of a flat tensor over all ranks. An error fails the step.
        """

        def call(x: int, out: int, elements: int, dtype: int) -> int:
            try:
                part, total = (_tensor_at(at, elements, _DTYPES[dtype]) for at in (x, out))
                total.copy_(add_up(part))
            except Exception:
                log.exception("a sum over ranks failed")
                return 1
            return 0

        self._function = _Function(call)
        self._set(self._function)


def _tensor_at(address: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Return a flat view of memory that another object owns."""
    memory = (c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
