"""The linear kernels in a program for another CPU, which an emulator runs.

`EmulatedLibrary` stands in for the library that `LinearKernels` calls: it sends what the pointers
point to, and stores what comes back.
"""

import ctypes
import struct
import subprocess

from octavo.kernels.cpu.linear import GROUP

ARRAYS = 9
CALL = struct.Struct(f"7q{ARRAYS}qd")
"""The same as in emulation/remote_linear.cpp."""


class EmulatedLibrary:
    """What `LinearKernels` calls.

    Attributes:
        isa: The name of the program's instruction set.
    """

    def __init__(self, *command):
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        (self._panel,) = struct.unpack("q", self._read(8))
        self.isa = self._read(16).decode().strip()
        self.octavo_panel_outputs = lambda: self._panel
        self.octavo_linear = Function(lambda *a: self._call(0, *a))
        self.octavo_linear_wide = Function(lambda *a: self._call(1, *a))
        self.octavo_linear_int8 = Function(self._int8)
        self.octavo_linear_int4 = Function(self._int4)
        self.octavo_linear_nibbles = Function(lambda *a: self._call(4, *a))

    def close(self):
        self._program.stdin.close()
        assert self._program.wait() == 0

    def _int8(self, x, rows, stride, layer, scales, out, threads):
        self._call(2, x, rows, stride, layer, out, threads, scales)

    def _int4(self, x, rows, stride, nibbles, layer, scales, out, threads):
        self._call(3, x, rows, stride, layer, out, threads, scales, nibbles)

    def _call(self, kind, x, rows, stride, layer, out, _threads, scales=None, nibbles=None):
        layer = layer._obj
        own = self._panel // 2 if layer.gated else self._panel
        padded = -(-layer.outputs // own) * self._panel
        outputs, inputs = layer.outputs, layer.inputs
        in_4_bits = padded * (inputs // GROUP) * (GROUP // 2 + 4)
        panels = in_4_bits if kind == 4 else padded * inputs * (2 if kind < 2 else 1)
        factors = scales._obj if scales is not None else None
        arrays = (
            (x, 2 * ((rows - 1) * stride + inputs)),
            (layer.panels, panels),
            (layer.bias, 4 * padded),
            (layer.norm, 2 * inputs),
            (layer.residual, 2 * ((rows - 1) * layer.residual_stride + outputs)),
            (factors and factors.factors, 4 * inputs),
            (factors and factors.outputs, 4 * padded),
            (factors and factors.row_sums, 4 * padded),
            (nibbles, in_4_bits),
        )
        sent = [ctypes.string_at(at, size) if at else b"" for at, size in arrays]
        head = (kind, rows, stride, inputs, outputs, layer.gated, layer.residual_stride)
        self._program.stdin.write(CALL.pack(*head, *map(len, sent), layer.epsilon))
        self._program.stdin.write(b"".join(sent))
        self._program.stdin.flush()
        found = self._read(rows * outputs * (4 if kind == 1 else 2))
        ctypes.memmove(out, found, len(found))

    def _read(self, size):
        found = self._program.stdout.read(size)
        assert len(found) == size, "the program has ended"
        return found


class Function:
    """A function that may be given types, as ctypes' may."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *arguments):
        return self._call(*arguments)
