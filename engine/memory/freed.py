"""Memory that this process has freed, but that its C library keeps."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MAPPED_BYTES = 1 << 20
M_MMAP_THRESHOLD, MAX_MAPPED_BYTES = -3, 32 << 20
"""The option of glibc's `mallopt`, and its maximum; see mallopt(3)."""
M_TRIM_THRESHOLD, KEPT_BYTES = -1, 64 << 20
"""The option for the free bytes that stay at the heap's end. With fewer, each step of 48 rows of
SmolLM2 gave memory back and had 1,200 to 2,000 page faults for it in the next; now 1 to 72."""


def return_freed() -> None:
    """Give the system back the pages that hold nothing, as glibc's `malloc_trim` does.

    Loading a model takes more than the model: float32 weights for the self-check, and tensors as
    the file has them. They lie between memory that stays, so glibc does not give theirs back. Where
    the C library has no such function, nothing is done.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


@contextmanager
def mapping_large() -> Iterator[None]:
    """Let memory of `MAPPED_BYTES` and more go back to the system as soon as it is freed, within.

    Such memory is mapped separately, which takes longer. By default glibc raises this size to that
    of freed memory, up to `MAX_MAPPED_BYTES`; afterwards it is that, and up to `KEPT_BYTES` stay
    for the next step. Where the C library has no such function, nothing is done.
    """
    _set(M_MMAP_THRESHOLD, MAPPED_BYTES)
    try:
        yield
    finally:
        _set(M_MMAP_THRESHOLD, MAX_MAPPED_BYTES)
        _set(M_TRIM_THRESHOLD, KEPT_BYTES)


def _set(option: int, size: int) -> None:
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(option, size)
