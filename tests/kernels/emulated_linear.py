"""The linear kernels in a program for another CPU, run by an emulator.

`EmulatedLibrary` stands in for the library that `LinearKernels` calls: it sends the memory behind
pointers, and stores the results.
"""

import ctypes
import struct
import subprocess

from octavo.kernels.cpu.blocks import FORMATS

ARRAYS = 8
CALL = struct.Struct(f"9q{ARRAYS}qd")
"""The same as in emulation/remote_linear.cpp."""
WIDE = 2
"""Type number of float32 elements; the same as in blocks.py."""


def format_of(number):
    (form,) = (form for form in FORMATS.values() if form.number == number)
    return form


class EmulatedLibrary:
    """The library that `LinearKernels` calls.

    Attributes:
        isa: The name of the program's instruction set.
    """

    def __init__(self, *command):
        self._program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        (self._panel,) = struct.unpack("q", self._read(8))
        self.isa = self._read(16).decode().strip()
        self.octavo_panel_outputs = lambda: self._panel
        self.octavo_linear = Function(lambda *a: self._call(0, *a))
        self.octavo_linear_float32 = Function(lambda *a: self._call(0, *a, blocks=(0, WIDE)))
        self.octavo_linear_wide = Function(lambda *a: self._call(1, *a))
        self.octavo_linear_int8 = Function(self._int8)
        self.octavo_linear_blocks = Function(self._blocks)
        self.octavo_embed_blocks = Function(None)
        self.octavo_widen_blocks = Function(self._widen)
        self.octavo_pack_blocks = Function(self._pack)
        self.octavo_pack_words = Function(self._pack_words)
        self.octavo_round_to_q4_1 = Function(self._round_to_q4_1)
        self.octavo_round_to_bytes = Function(self._round_to_bytes)
        self.octavo_find_widest = Function(self._find_widest)

    def close(self):
        self._program.stdin.close()
        assert self._program.wait() == 0

    def _int8(self, x, rows, stride, layer, scales, out, threads):
        self._call(2, x, rows, stride, layer, out, threads, scales)

    def _blocks(self, x, rows, stride, layer, number, elements, out, threads):
        self._call(3, x, rows, stride, layer, out, threads, blocks=(number, elements))

    def _widen(self, rows, row_bytes, order, outputs, number, wide, out, _threads):
        form = format_of(number)
        size = outputs * row_bytes // form.unit_bytes * form.unit * (4 if wide else 2)
        self._read_stored(4, rows, row_bytes, order, outputs, number, wide, out, size)

    def _pack(self, rows, row_bytes, order, outputs, number, out, _threads):
        form = format_of(number)
        padded = -(-outputs // self._panel) * self._panel
        size = padded * row_bytes // form.unit_bytes * form.packed_bytes
        self._read_stored(5, rows, row_bytes, order, outputs, number, 0, out, size)

    def _pack_words(self, rows, row_bytes, outputs, words, out, _threads):
        size = -(-outputs // self._panel) * self._panel * words * 4
        sent = ctypes.string_at(rows, (outputs - 1) * row_bytes + words * 4)
        self._send((6, 0, row_bytes, words, outputs, 0, size, 0, 0), [sent])
        ctypes.memmove(out, self._read(size), size)

    def _round_to_q4_1(self, weight, stride, wide, outputs, groups, out, _threads):
        sent = ctypes.string_at(weight, ((outputs - 1) * stride + groups * 32) * (4 if wide else 2))
        size = outputs * groups * FORMATS["Q4_1"].unit_bytes
        self._send((7, 0, stride, groups, outputs, 0, size, 0, wide), [sent])
        ctypes.memmove(out, self._read(size), size)

    def _round_to_bytes(
        self, weight, stride, wide, outputs, inputs, factors, out, scales, sums, _threads
    ):
        sent = ctypes.string_at(weight, ((outputs - 1) * stride + inputs) * (4 if wide else 2))
        size = outputs * (inputs + 8)
        arrays = [sent, ctypes.string_at(factors, 4 * inputs)]
        self._send((8, 0, stride, inputs, outputs, 0, size, 0, wide), arrays)
        for to, bytes_each in ((scales, 4), (sums, 4), (out, inputs)):
            ctypes.memmove(to, self._read(outputs * bytes_each), outputs * bytes_each)

    def _find_widest(self, weight, stride, wide, outputs, inputs, out, _threads):
        sent = ctypes.string_at(weight, ((outputs - 1) * stride + inputs) * (4 if wide else 2))
        self._send((9, 0, stride, inputs, outputs, 0, 4 * inputs, 0, wide), [sent])
        ctypes.memmove(out, self._read(4 * inputs), 4 * inputs)

    def _read_stored(self, kind, rows, row_bytes, order, outputs, number, wide, out, size):
        places = range(outputs)
        if order is not None:
            places = (ctypes.c_int64 * outputs).from_address(order)
        sent = ctypes.string_at(rows, row_bytes * (max(places) + 1))
        places = b"" if order is None else bytes(places)
        self._send((kind, 0, row_bytes, 0, outputs, 0, size, number, wide), [sent, places])
        ctypes.memmove(out, self._read(size), size)

    def _call(self, kind, x, rows, stride, layer, out, _threads, scales=None, blocks=(0, 0)):
        layer = layer._obj
        own = self._panel // 2 if layer.gated else self._panel
        padded = -(-layer.outputs // own) * self._panel
        outputs, inputs = layer.outputs, layer.inputs
        number, elements = blocks
        size = 4 if elements == WIDE else 2
        panels = padded * inputs * (size if kind < 2 else 1)
        if kind == 3:
            form = format_of(number)
            panels = padded * inputs // form.unit * form.packed_bytes
        factors = scales._obj if scales is not None else None
        arrays = (
            (x, size * ((rows - 1) * stride + inputs)),
            (layer.panels, panels),
            (layer.bias, 4 * padded),
            (layer.norm, size * inputs),
            (layer.residual, size * ((rows - 1) * layer.residual_stride + outputs)),
            (factors and factors.factors, 4 * inputs),
            (factors and factors.outputs, 4 * padded),
            (factors and factors.row_sums, 4 * padded),
        )
        sent = [ctypes.string_at(at, size) if at else b"" for at, size in arrays]
        head = (kind, rows, stride, inputs, outputs, layer.gated, layer.residual_stride, *blocks)
        self._send(head, sent, layer.epsilon)
        found = self._read(rows * outputs * (4 if kind == 1 or elements else 2))
        ctypes.memmove(out, found, len(found))

    def _send(self, head, arrays, epsilon=0.0):
        sizes = [*map(len, arrays), *[0] * (ARRAYS - len(arrays))]
        self._program.stdin.write(CALL.pack(*head, *sizes, epsilon))
        self._program.stdin.write(b"".join(arrays))
        self._program.stdin.flush()

    def _read(self, size):
        found = self._program.stdout.read(size)
        assert len(found) == size, "the program has ended"
        return found


class Function:
    """A function with attributes for types, as in ctypes."""

    def __init__(self, call):
        self._call = call

    def __call__(self, *arguments):
        return self._call(*arguments)
