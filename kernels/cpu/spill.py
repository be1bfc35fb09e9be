"""Reads keys and values from a file while a step attends to them; see spill.h."""

import weakref
from ctypes import CDLL, POINTER, Structure, byref, c_bool, c_int32, c_int64, c_void_p


class SpillLayout(Structure):
    """The file and the memory that it is read to; the same as in spill.h."""

    _fields_ = (
        *(("unit_bytes", c_int64), ("num_units", c_int64)),
        *(("block_elements", c_int64), ("values_at", c_int64)),
        *(("file", c_int32), ("num_layers", c_int32), ("unit_blocks", c_int32)),
        *(("ring_units", c_int32), ("threads", c_int32)),
    )


class SpillKernels:
    """Opens readers of files.

    Args:
        library: The kernels.
    """

    def __init__(self, library: CDLL) -> None:
        self._open, self._close = library.octavo_open_spill, library.octavo_close_spill
        self._begin, self._end = library.octavo_begin_spill, library.octavo_end_spill
        self._open.argtypes, self._open.restype = (POINTER(SpillLayout),), c_void_p
        self._close.argtypes, self._close.restype = (c_void_p,), None
        self._begin.argtypes, self._begin.restype = (c_void_p, c_int32, c_int32), None
        self._end.argtypes, self._end.restype = (c_void_p,), c_bool

    def open(self, layout: SpillLayout) -> "SpillReader":
        """Return a reader with threads of its own, which end with it.

        Raises:
            MemoryError: There is no memory for the ring.
        """
        address = self._open(byref(layout))
        if not address:
            raise MemoryError("no memory to read spilled blocks to")
        return SpillReader(self, address)

    def begin(self, address: int, index: int, units: int) -> None:
        """Begin a step; see `SpillReader.begin`."""
        self._begin(address, index, units)

    def end(self, address: int) -> bool:
        """End a step; see `SpillReader.end`."""
        return bool(self._end(address))

    def close(self, address: int) -> None:
        """End a reader's threads."""
        self._close(address)


class SpillReader:
    """Reads a file's units, layer by layer, as this thread's step attends to them."""

    def __init__(self, kernels: SpillKernels, address: int) -> None:
        self._kernels = kernels
        self._address = address
        self._closing = weakref.finalize(self, kernels.close, address)
        self._closing.atexit = False  # the process's end ends the threads

    def begin(self, index: int, units: int) -> None:
        """Begin this thread's step, and start to read.

        Args:
            index: The spilled sequence's index in the batch.
            units: Number of units that hold its first tokens.
        """
        self._kernels.begin(self._address, index, units)

    def end(self) -> bool:
        """End the step; return whether a read failed, which makes the sequence's results wrong."""
        return self._kernels.end(self._address)
