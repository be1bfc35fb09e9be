"""Memory in pages of 2 MiB: what is read all over in every step, looked up less often.

Only hints: where they are not taken, the memory is as it was.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterable, Iterator

import torch

# Of Linux 6.1 and 5.14, and not named by `mmap`.
_COLLAPSE = 25  # MADV_COLLAPSE
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE
_AT_ONCE = 4 << 20
"""Bytes that Linux finds at once, in some milliseconds."""


def ask_for(tensor: torch.Tensor) -> None:
    """Has Linux back a tensor that has not been touched yet."""
    _advise(*_span([tensor]), mmap.MADV_HUGEPAGE)


def collapse(tensors: Iterable[torch.Tensor]) -> None:
    """Has Linux move tensors that lie side by side, at some 300 MB a second.

    Weights that oneDNN packed are left where they are: it does not tell where that is.
    The weights of SmolLM2-135M are then read in 8.2 ms a step of one row, not in 11.0.
    """
    start, length = _span([tensor for tensor in tensors if not tensor.is_mkldnn])
    _advise(start, length, mmap.MADV_HUGEPAGE)
    _advise(start, length, _COLLAPSE)


def populate(tensor: torch.Tensor) -> Iterator[bool]:
    """Has Linux find the memory for a tensor, not only when it is first written to.

    What is there stays. In a virtual machine whose host has to find it first, a GiB may take 3 s.

    Yields:
        True, after each few MiB.
    """
    start, length = _span([tensor])
    for done in range(0, length, _AT_ONCE):
        _advise(start + done, min(_AT_ONCE, length - done), _POPULATE_WRITE)
        yield True


def _span(tensors: list[torch.Tensor]) -> tuple[int, int]:
    """The whole pages from the first to the last byte: address and length."""
    first = min((tensor.data_ptr() for tensor in tensors), default=0)
    end = max((tensor.data_ptr() + tensor.nbytes for tensor in tensors), default=0)
    start = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE
    return start, end - start


def _advise(start: int, length: int, advice: int) -> None:
    if sys.platform == "linux" and length > 0:
        libc = ctypes.CDLL(None)
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advice)
