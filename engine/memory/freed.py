"""Returns memory to the system that this process has freed but its C library keeps."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, suppress

MAPPED_BYTES = 1 << 20
M_MMAP_THRESHOLD, MAX_MAPPED_BYTES = -3, 32 << 20
"""Option of glibc's `mallopt` for mapped memory, and its maximum; see mallopt(3)."""
M_TRIM_THRESHOLD, KEPT_BYTES = -1, 64 << 20
"""Option for the free bytes that stay at the heap's end. With fewer, each step of 48 rows of
SmolLM2 returned memory and had 1,200 to 2,000 page faults in the next step; now 1 to 72."""


def return_freed() -> None:
    """Return empty pages to the system with glibc's `malloc_trim`.

    Loading takes more memory than the model: float32 weights for the self-check, and tensors from
    the file. They are between memory that stays, so glibc does not return theirs. If the C library
    lacks the function, nothing happens.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


@contextmanager
def mapping_large() -> Iterator[None]:
    """Within the context, return memory of `MAPPED_BYTES` and more as soon as it is freed.

    Such memory is mapped separately, which takes longer. By default glibc raises this size to that
    of freed memory, up to `MAX_MAPPED_BYTES`; after the context it is that maximum, and up to
    `KEPT_BYTES` stay for the next step. If the C library lacks the function, nothing happens.
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
