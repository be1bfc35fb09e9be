"""Communication between ranks within a step: sums in memory, or functions that C++ calls."""

import logging
import mmap
from collections.abc import Callable
from ctypes import CDLL, CFUNCTYPE, addressof, c_char, c_double, c_int, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

DTYPES = torch.float32, torch.float16, torch.bfloat16
"""Dtypes by their numbers in sum_over_ranks.cpp."""
_Function = CFUNCTYPE(c_int, c_int, c_void_p, c_void_p, c_int64, c_int)

log = logging.getLogger(__name__)


class RankSums:
    """Sets how this process sums over ranks.

    Args:
        library: The kernels.
    """

    def __init__(self, library: CDLL) -> None:
        self._set = library.octavo_set_exchange
        self._set.argtypes, self._set.restype = (_Function,), None
        self._set_ring = library.octavo_set_ring
        self._set_ring.argtypes, self._set_ring.restype = (c_void_p, c_int, c_int, c_double), None
        self._bytes = library.octavo_ring_bytes
        self._bytes.restype = c_int64
        self._add = library.octavo_sum_over_ranks
        self._add.argtypes = (c_void_p, c_void_p, c_void_p, c_int64, c_int)
        self._seconds = library.octavo_ring_seconds
        self._seconds.restype = c_double
        self._function: Any = None  # what C++ points to, like the next
        self._memory: Any = None

    def set(self, *functions: Callable[..., Tensor]) -> None:
        """Set the functions of traced steps.

        The thread that runs a step calls them, with the interpreter's lock held.

        Args:
            *functions: Return, from a flat tensor, its sum over ranks that share no memory, the
                previous stage's tensor, and the same that is sent to the next stage. They may write
                it into their argument `out`. An error fails the step.
        """

        def call(what: int, x: int, out: int, elements: int, dtype: int) -> int:
            try:
                own, made = (_tensor_at(at, elements, DTYPES[dtype]) for at in (x, out))
                result = functions[what](own, out=made)
                if result is not made:
                    made.copy_(result)
            except Exception as error:  # noqa: BLE001 - the step fails
                log.error("a message between ranks failed: %s", error)  # noqa: TRY400 - one line
                return 1
            return 0

        self._function = _Function(call)
        self._set(self._function)

    def bytes(self, ranks: int) -> int:
        """Return the bytes of memory that ranks need to share."""
        return int(self._bytes(ranks))

    def share(self, memory: mmap.mmap, rank: int, ranks: int, patience: float) -> None:
        """Sum in shared memory from now on.

        Args:
            memory: The memory, zeros at first.
            rank: The number of this rank.
            ranks: The number of ranks.
            patience: Maximum seconds to wait for another rank.
        """
        self._memory = c_char.from_buffer(memory)
        self._set_ring(addressof(self._memory), rank, ranks, patience)

    def add(self, x: Tensor) -> Tensor:
        """Return the sum of a contiguous tensor of one of `DTYPES` in shared memory.

        Raises:
            RuntimeError: Another rank did not come.
        """
        total = torch.empty_like(x)
        elements, dtype = x.numel(), DTYPES.index(x.dtype)
        if self._add(x.data_ptr(), None, total.data_ptr(), elements, dtype):
            raise RuntimeError("another rank did not come to a sum")
        return total

    @property
    def seconds(self) -> float:
        """Seconds that this process has spent in sums in shared memory."""
        return float(self._seconds())


def _tensor_at(address: int, elements: int, dtype: torch.dtype) -> Tensor:
    """Return a flat view of memory that another object owns."""
    memory = (c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
