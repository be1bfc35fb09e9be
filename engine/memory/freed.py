"""Memory that this process has freed, but that its C library keeps."""

import ctypes
from contextlib import suppress


def return_freed() -> None:
    """Give the system back the pages that hold nothing, as glibc's `malloc_trim` does.

    Loading a model takes more than the model: float32 weights for the self-check, and tensors as
    the file has them. They lie between what stays, so glibc keeps their memory by itself. Where
    the C library has no such function, nothing is done.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
