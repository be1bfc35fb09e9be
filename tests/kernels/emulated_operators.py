"""The operators of libraries for other CPUs, with the calls of `torch.ops.octavo_cpu`."""

import ctypes
import struct
import subprocess
from functools import partial

import torch

from octavo.kernels.cpu.program import View, word_of

DTYPES = {
    torch.uint8: 0,
    torch.int8: 1,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.bfloat16: 15,
}
"""PyTorch's numbers of dtypes, as in emulation/torch.cpp."""
ADDRESSED = {"pack_blocks", "widen_blocks"}
"""Operators whose second tensor has the addresses of rows, and whose third argument their bytes."""
CALL = struct.Struct("32s4q")
"""The same as in emulation/remote.cpp."""
MESSAGE = 256


def raise_problem(problem):
    if problem:
        raise (IndexError if problem[:1] == b"I" else ValueError)(problem[1:].decode())


def letter_of(number):
    """Return the letter of an argument in C++'s signatures."""
    return "o" if number is None else "f" if isinstance(number, float) else "i"


class EmulatedOperators:
    """Operators by name."""

    def __getattr__(self, name):
        return partial(self._run, name)

    def _run(self, name, *arguments):
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        places = iter(range(len(tensors)))
        words = [
            next(places) if isinstance(one, torch.Tensor) else word_of(letter_of(one), one)
            for one in arguments
        ]
        return self._call(name, words, tensors)

    def _call(self, name, words, tensors):
        """Call an operator; return its result, or None."""
        raise NotImplementedError


class LoadedOperators(EmulatedOperators):
    """The operators of a library."""

    def __init__(self, library):
        self._library = library
        library.octavo_call.restype = ctypes.c_char_p

    def _call(self, name, words, tensors):
        self._library.octavo_set_threads(torch.get_num_threads())
        views = (View * len(tensors))(*(view_of(one, one.data_ptr()) for one in tensors))
        made = View()
        given = (ctypes.c_int64 * len(words))(*words)
        raise_problem(
            self._library.octavo_call(name.encode(), given, views, ctypes.byref(made)) or b""
        )
        if not made.dimensions:
            return None
        out = torch.empty(made.sizes[: made.dimensions], dtype=dtype_of(made))
        ctypes.memmove(out.data_ptr(), made.data, out.nbytes)
        return out


class RemoteOperators(EmulatedOperators):
    """The operators of a program for another CPU, run by an emulator.

    Attributes:
        panel: Outputs of a panel.
        isa: The name of the program's instruction set.
    """

    def __init__(self, *command):
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        (self.panel,) = struct.unpack("q", self._read(8))
        self.isa = self._read(16).decode().strip()

    def close(self):
        self._program.stdin.close()
        assert self._program.wait() == 0

    def _call(self, name, words, tensors):
        if addressed := name in ADDRESSED:
            tensors = with_rows(tensors, words[2])
        sent = [ctypes.string_at(one.data_ptr(), bytes_of(one)) for one in tensors]
        views = (view_of(one, 0) for one in tensors)
        threads = torch.get_num_threads()
        self._program.stdin.write(
            CALL.pack(name.encode(), threads, len(words), len(sent), addressed)
            + struct.pack(f"{len(words)}q{len(sent)}q", *words, *map(len, sent))
            + b"".join(map(bytes, views))
            + b"".join(sent)
        )
        self._program.stdin.flush()
        problem = self._read(MESSAGE).rstrip(b"\0")
        for one, data in zip(tensors, sent, strict=True):
            changed = self._read(len(data))
            if changed != data:
                ctypes.memmove(one.data_ptr(), changed, len(data))
        made = View.from_buffer_copy(self._read(ctypes.sizeof(View)))
        raise_problem(problem)
        if not made.dimensions:
            return None
        out = torch.empty(made.sizes[: made.dimensions], dtype=dtype_of(made))
        ctypes.memmove(out.data_ptr(), self._read(out.nbytes), out.nbytes)
        return out

    def _read(self, size):
        found = self._program.stdout.read(size)
        assert len(found) == size, "the program has ended"
        return found


def with_rows(tensors, row_bytes):
    """Return tensors for another process: addresses become offsets into a copy of their rows."""
    out, addresses = tensors
    rows = [
        ctypes.string_at(at, row_bytes) if at else b"\0" * row_bytes for at in addresses.tolist()
    ]
    places = torch.arange(len(rows)) * row_bytes + 1
    memory = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
    return [out, torch.where(addresses == 0, 0, places), memory]


def bytes_of(tensor):
    """Return the bytes from a tensor's first element to its last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * at for size, at in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def view_of(tensor, address):
    numbers = ctypes.c_int64 * 8
    layout = numbers(*tensor.shape), numbers(*tensor.stride())
    return View(address, DTYPES[tensor.dtype], tensor.dim(), *layout)


def dtype_of(view):
    (dtype,) = (dtype for dtype, number in DTYPES.items() if number == view.dtype)
    return dtype
